"""Reward a response for following the instructions of its prompt, as IFEval and open-instruct verify them.

The instructions of a row may be in either of the two forms of datasets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv._util.brief import brief
from agentenv.core.arguments import one_of
from agentenv.errors import DataError, InfraError
from agentenv.rewards.rules.ifeval.functions import RULES as _BY_NAME
from agentenv.rewards.rules.ifeval.official import RULES as _BY_ID
from agentenv.rewards.rules.ifeval.rules import Rule, items_of
from agentenv.rewards.rules.text import final_text, is_blank
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerTimeout, shared_pool

RULES: Mapping[str, Rule] = {**_BY_ID, **_BY_NAME}
"""The rule of each instruction id and each function name."""
MODES = ("strict", "loose")
_MAX_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a row: a name of `RULES`, and the parameters of that rule."""

    name: str
    params: Mapping[str, Any]

    @property
    def rule(self) -> Rule:
        """The rule of that name."""
        return RULES[self.name]

    def followed_by(self, text: str) -> bool:
        """Return True if the text follows it; a text without a visible character follows nothing.

        Raises:
            MissingDependency: the text's language must be detected, and langdetect is not installed.
        """
        return not is_blank(text) and self.rule.check(text, **self.params)


def check_text(instructions: list[Instruction], text: str, mode: str) -> list[bool]:
    """Return True for each instruction that the text (`strict`), or any of its `variants` (`loose`), follows.

    Raises:
        MissingDependency: see `Instruction.followed_by`.
    """
    texts = variants(text) if mode == "loose" else [text]
    return [any(map(each.followed_by, texts)) for each in instructions]


def variants(text: str) -> list[str]:
    """Return IFEval's loose variants: the text, without its first line, its last, or both, and each without stars."""
    lines = text.split("\n")
    shortened = ("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))
    readings = [text, *shortened]
    return list(dict.fromkeys([*readings, *(reading.replace("*", "") for reading in readings)]))


def instructions_of(label: object, columns: Mapping[str, Any]) -> list[Instruction]:
    """Return the instructions of a label, as JSON or not, or else of the row's other columns.

    They have the form `{"func_name": …, **parameters}` or `{"instruction_id_list": […], "kwargs": […]}`; a list of
    these is their union. Parameters that are None are missing; unknown ones are ignored.

    Raises:
        DataError: there are none, one has an unknown name, or a parameter is missing or of a wrong type.
    """
    for source in (_decoded(label), columns):
        specs = [source] if isinstance(source, Mapping) else items_of(source) or []
        instructions = [each for spec in specs if isinstance(spec, Mapping) for each in _instructions(spec)]
        if instructions:
            return instructions
    raise DataError(
        "label: expected IFEval's {'func_name': …} or {'instruction_id_list': […], 'kwargs': […]}, in the label or the "
        f"row's columns, got {brief(label, _MAX_SHOWN_CHARS)}. Correct the row."
    )


def _decoded(value: object) -> object:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _instructions(spec: Mapping[str, Any]) -> list[Instruction]:
    if spec.get("func_name") is not None:
        return [_instruction(spec["func_name"], spec)]
    if spec.get("instruction_id_list") is None:
        return []
    names, params = items_of(_decoded(spec["instruction_id_list"])), items_of(_decoded(spec.get("kwargs")))
    params = params or ([{} for _ in names] if names else None)
    if not names or params is None or len(names) != len(params):
        got = brief((spec["instruction_id_list"], spec.get("kwargs")), 2 * _MAX_SHOWN_CHARS)
        raise DataError(f"kwargs: expected one entry for each of instruction_id_list, got {got}. Correct the row.")
    return [_instruction(name, _decoded(each)) for name, each in zip(names, params, strict=True)]


def _instruction(name: object, params: object) -> Instruction:
    if not isinstance(name, str) or name not in RULES:
        known = ", ".join(RULES)
        got = brief(name, _MAX_SHOWN_CHARS)
        raise DataError(f"instruction: expected one of {known}, got {got}. Correct the row.")
    given = {} if params is None else params
    if not isinstance(given, Mapping):
        got = brief(params, _MAX_SHOWN_CHARS)
        raise DataError(f"{name}: expected its parameters by name, got {got}. Correct the row.")
    rule = RULES[name]
    optional = {key: kind for key, kind in rule.optional.items() if given.get(key) is not None}
    values: dict[str, Any] = {}
    for key, kind in {**rule.params, **optional}.items():
        values[key] = kind.read(given.get(key))
        if values[key] is None:
            got = brief(given.get(key), _MAX_SHOWN_CHARS)
            raise DataError(f"{name}.{key}: expected {kind.expected}, got {got}. Correct the row.")
    return Instruction(name, values)


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Return `{"followed": [bool, …]}` for `{"text", "mode", "instructions": [[name, parameters], …]}`.

    Raises:
        MissingDependency: a text's language must be detected, and langdetect is not installed.
    """
    instructions = [Instruction(name, params) for name, params in request["instructions"]]
    return {"followed": check_text(instructions, request["text"], request["mode"])}


CREDITS = ("all", "fraction")
MAX_CHARS = 1_000_000
"""Longer answers are rejected; cutting them would change them."""
_INLINE_CHARS = 2000
"""Longer texts are checked in a worker process."""
_CPU_LIMIT_S = 20.0


class IFEvalReward:
    """The share of the row's instructions that the answer follows, or 1 only if it follows all.

    The answer is the text after the thinking. `mode` "strict" checks it unchanged; "loose" takes the best of eight
    variants, as IFEval does (without its first or last line, without stars). With `credit` "all" the reward is 1 for
    following every instruction, else 0; with "fraction" it is the share. The score is 1 if the answer follows all.

    The instructions are the label or the row's other columns, see `instructions_of`. Components: `followed` (share),
    `all` (0 or 1), `num_instructions`. If an instruction needs langdetect and it is missing, the status is INFRA.

    Raises:
        ConfigError: `mode` or `credit` is unknown.
    """

    bounds = (0.0, 1.0)

    def __init__(self, *, mode: str = "strict", credit: str = "all") -> None:
        self._mode = one_of("IFEvalReward.mode", mode, MODES)
        self._credit = one_of("IFEvalReward.credit", credit, CREDITS)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result; the feedback lists the ids of instructions that the answer does not follow.

        Raises:
            DataError: the row has no instructions, or one that cannot be read; says which parameter is wrong.
        """
        instructions = instructions_of(response.label, response.metadata)
        text = final_text(response.text, response.prompt)
        if not text:
            return self._nothing(instructions, Status.NO_ANSWER, "no answer")
        if len(text) > MAX_CHARS:
            return self._nothing(instructions, Status.PARSE_ERROR, f"the answer has more than {MAX_CHARS} characters")
        try:
            if len(text) <= _INLINE_CHARS and not any(instruction.rule.detects for instruction in instructions):
                followed = check_text(instructions, text, self._mode)
            else:
                asked = [[instruction.name, dict(instruction.params)] for instruction in instructions]
                request = {"task": f"{__name__}:handle", "text": text, "mode": self._mode, "instructions": asked}
                reply = await shared_pool().run(request, cpu_limit_s=_CPU_LIMIT_S)
                followed = [bool(each) for each in reply["followed"]]
        except WorkerTimeout as error:
            return self._nothing(instructions, Status.TIMEOUT, str(error))
        except InfraError as error:
            return RewardResult.failed(str(error))
        components = _components(followed)
        missed = [each.rule.type for each, is_followed in zip(instructions, followed, strict=True) if not is_followed]
        feedback = f"{sum(followed)} of {len(followed)} instructions followed"
        if missed:
            feedback += f"; not {', '.join(dict.fromkeys(missed))}"
        return RewardResult(
            components["all" if self._credit == "all" else "followed"],
            components["all"],
            components=components,
            feedback=feedback + ".",
        )

    def _nothing(self, instructions: list[Instruction], status: Status, why: str) -> RewardResult:
        components = _components([False] * len(instructions))
        return RewardResult(0.0, 0.0, status, components, feedback=f"No instruction followed: {why}.", detail=why)


def _components(followed: list[bool]) -> Mapping[str, float]:
    share = sum(followed) / len(followed)
    return {"followed": share, "all": float(all(followed)), "num_instructions": float(len(followed))}
