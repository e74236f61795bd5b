"""Reads which instructions a row gives, in either of the two forms that datasets have, and judges a text by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.errors import DataError, MissingDependency
from agentenv.rewards._arguments import shown
from agentenv.rewards.ifeval._functions import RULES as _BY_NAME
from agentenv.rewards.ifeval._official import RULES as _BY_ID
from agentenv.rewards.ifeval._rules import Kind, Rule, items_of

RULES: Mapping[str, Rule] = {**_BY_ID, **_BY_NAME}
"""Every instruction id and every function name: its rule."""
MODES = ("strict", "loose")
_MAX_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a row: a name of `RULES`, and its parameters as that rule takes them."""

    name: str
    params: Mapping[str, Any]

    @property
    def type(self) -> str:
        """The instruction id: itself, or the one that asks for what the named function verifies."""
        return RULES[self.name].type

    @property
    def detects(self) -> bool:
        """Whether judging it may take language detection."""
        return RULES[self.name].detects

    def followed_by(self, text: str) -> bool:
        """Whether the text follows it as it is; one without a character to see follows nothing.

        Raises:
            MissingDependency: the text's language must be detected, and langdetect is not installed.
        """
        return any(map(_is_seen, text)) and RULES[self.name].check(text, **self.params)


def _is_seen(character: str) -> bool:
    """Whether it leaves a mark: no white space, and nothing of no width."""
    return character.isprintable() and not character.isspace()


def judged(instructions: list[Instruction], text: str, mode: str) -> list[bool]:
    """Which of the instructions the text follows: as it is (`strict`), or any of its `variants` (`loose`).

    Raises:
        MissingDependency: see `Instruction.followed_by`; only where no reading that can be judged without follows.
    """
    texts = variants(text) if mode == "loose" else [text]
    return [_any_follows(instruction, texts) for instruction in instructions]


def _any_follows(instruction: Instruction, texts: list[str]) -> bool:
    missing: MissingDependency | None = None
    for text in texts:
        try:
            if instruction.followed_by(text):
                return True
        except MissingDependency as error:
            missing = error
    if missing is not None:
        raise missing
    return False


def variants(text: str) -> list[str]:
    """IFEval's loose readings: the text, without its first line, its last, or both, and each of them without stars."""
    lines = text.split("\n")
    shortened = ("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))
    readings = [text, *shortened]
    return list(dict.fromkeys([*readings, *(reading.replace("*", "") for reading in readings)]))


def instructions_of(label: object, columns: Mapping[str, Any]) -> list[Instruction]:
    """The instructions that a label holds, as JSON or not, or else the row's other columns; nothing of it is changed.

    Either form will do: `{"func_name": …, **parameters}` or `{"instruction_id_list": […], "kwargs": […]}`. A list of
    such is all of them. Parameters that are None are missing; those that a rule does not have are left alone.

    Raises:
        DataError: there are none, one has an unknown name, or a parameter is missing or of a wrong type.
    """
    for held in (_decoded(label), columns):
        found = [each for spec in _specs(held) for each in _instructions(spec)]
        if found:
            return found
    raise DataError(
        "label: expected IFEval's {'func_name': …} or {'instruction_id_list': […], 'kwargs': […]}, in the label or the "
        f"row's columns, got {shown(repr(label), _MAX_SHOWN_CHARS)}. Correct the row."
    )


def _decoded(value: object) -> object:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _specs(held: object) -> list[Mapping[str, Any]]:
    members = [held] if isinstance(held, Mapping) else items_of(held) or []
    return [member for member in members if isinstance(member, Mapping)]


def _instructions(spec: Mapping[str, Any]) -> list[Instruction]:
    if spec.get("func_name") is not None:
        return [_instruction(spec["func_name"], spec)]
    if spec.get("instruction_id_list") is None:
        return []
    names, params = items_of(_decoded(spec["instruction_id_list"])), items_of(_decoded(spec.get("kwargs")))
    params = params or ([{} for _ in names] if names else None)
    if not names or params is None or len(names) != len(params):
        got = shown(repr((spec["instruction_id_list"], spec.get("kwargs"))), 2 * _MAX_SHOWN_CHARS)
        raise DataError(f"kwargs: expected one entry for each of instruction_id_list, got {got}. Correct the row.")
    return [_instruction(name, _decoded(each)) for name, each in zip(names, params, strict=True)]


def _instruction(name: object, params: object) -> Instruction:
    if not isinstance(name, str) or name not in RULES:
        known = ", ".join(RULES)
        got = shown(repr(name), _MAX_SHOWN_CHARS)
        raise DataError(f"instruction: expected one of {known}, got {got}. Correct the row.")
    given = {} if params is None else params
    if not isinstance(given, Mapping):
        got = shown(repr(params), _MAX_SHOWN_CHARS)
        raise DataError(f"{name}: expected its parameters by name, got {got}. Correct the row.")
    rule = RULES[name]
    optional = {key: kind for key, kind in rule.optional.items() if given.get(key) is not None}
    kinds = {**rule.params, **optional}
    return Instruction(name, {key: _parameter(f"{name}.{key}", kind, given.get(key)) for key, kind in kinds.items()})


def _parameter(where: str, kind: Kind, value: object) -> Any:
    read = kind.read(value)
    if read is None:
        raise DataError(
            f"{where}: expected {kind.expected}, got {shown(repr(value), _MAX_SHOWN_CHARS)}. Correct the row."
        )
    return read
