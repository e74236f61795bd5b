r"""The answer that a response to an item of reasoning-gym commits to, and its score as a reward.

It is the content of the last `<answer>…</answer>`, or of the last `\boxed{…}`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from agentenv.core.arguments import number, one_of, whole_number
from agentenv.errors import DataError, MissingDependency
from agentenv.rewards.rules.text import final_text, is_taken_back, standing_box, with_opened_thought
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerTimeout, shared_pool
from agentenv_envs.reasoning_gym.scoring import request_of

AnswerForm = Literal["auto", "tag", "boxed"]
"""tag, boxed: that form only; auto: the tag, or where there is none, the box."""
INSTRUCTIONS = {
    "auto": "Give the final answer, and nothing else, between <answer> and </answer>.",  # english: off
    "tag": "Give the final answer, and nothing else, between <answer> and </answer>.",  # english: off
    "boxed": r"Give the final answer, and nothing else, in \boxed{}.",  # english: off
}
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_FENCE = re.compile(r"```[A-Za-z]{0,16}\n(.*)```", re.DOTALL)


def extract(text: str, form: str = "auto") -> str | None:
    """Return the answer without white space or a code fence around it; None if the response has none.

    Text in a thought, including one that never ends, does not count. Takes linear time.
    """
    final = final_text(text)
    if final is None:
        return None
    # The text between the last closed `<answer>` that is not taken back and its end.
    opened, start, answer = -1, -1, None
    for tag in _TAG.finditer(final) if form != "boxed" else ():
        if not tag[1]:
            opened, start = tag.span()
        elif start >= 0:
            answer = answer if is_taken_back(final, opened, tag.end()) else final[start : tag.start()]
            start = -1
    if answer is None and form != "tag":
        answer = standing_box(final)
    if not answer:
        return None
    answer = answer.strip("\r\n").rstrip()
    if fenced := _FENCE.fullmatch(answer.strip()):
        return fenced[1].rstrip() or None
    # White space at the start of the first line of a board may matter.
    return (answer if "\n" in answer else answer.strip()) or None


def wrapped(answer: str, form: str = "auto") -> str:
    """Return a response with this answer."""
    return rf"\boxed{{{answer}}}" if form == "boxed" else f"<answer>{answer}</answer>"


class ReasoningGymReward:
    r"""Scores a response's last `<answer>…</answer>`, or its last `\boxed{…}`, with the item's own scorer.

    The label is the item as its dataset generated it: `{"question", "answer", "metadata"}`, an object or its JSON. All
    scorers run in worker processes with limits, shared with the library's own rewards.

    Reward and score: 1.0 for the scorer's full score, else 0.0; with `partial_credit` the scorer's value, except for
    values that an empty answer also gets, and for answers that merely contain the right one. No answer is worth 0.0.
    components: value (the scorer's own, after repairs), has_answer.

    Example::

        reward = ReasoningGymReward()
        await reward.grade(Response("<answer>4</answer>", label=item))
    """

    bounds = (0.0, 1.0)

    def __init__(
        self,
        *,
        answer: AnswerForm = "auto",
        partial_credit: bool = False,
        max_answer_chars: int = 8192,
        cpu_limit_s: float = 5.0,
    ) -> None:
        """Set the options; nothing is started.

        Args:
            answer: the form of an answer: tag, boxed, or auto for either.
            partial_credit: reward nearly right answers.
            max_answer_chars: longer answers are not scored; the longest right ones have about 5,000.
            cpu_limit_s: CPU time for a scorer.

        Raises:
            ConfigError: a value is out of range.
            MissingDependency: reasoning-gym is not installed.
        """
        require_reasoning_gym()
        self._form = one_of("ReasoningGym.answer", answer, INSTRUCTIONS)
        self._partial = bool(partial_credit)
        self._max_chars = whole_number("ReasoningGym.max_answer_chars", max_answer_chars, low=1)
        self._cpu_s = number("ReasoningGym.cpu_limit_s", cpu_limit_s, low=0.001)

    async def grade(self, response: Response) -> RewardResult:
        """Grade a response.

        Raises:
            DataError: the label is not an item of these datasets.
            InfraError: the workers failed.
        """
        entry = entry_of(response.label)
        answer = extract(with_opened_thought(response.text, response.prompt), self._form)
        if answer is None:
            return _nothing(Status.NO_ANSWER, None, "the response has no answer")
        if len(answer) > self._max_chars:
            detail = f"the answer has {len(answer)} characters; at most {self._max_chars} are scored"
            return _nothing(Status.PARSE_ERROR, answer[:200], detail)
        try:
            request = request_of(entry, answer, partial=self._partial)
            outcome = await shared_pool().run(request, cpu_limit_s=self._cpu_s)
        except WorkerTimeout as error:
            return _nothing(Status.TIMEOUT, answer, str(error))
        if outcome["outcome"] != "scored":
            return _nothing(Status(outcome["outcome"]), answer, outcome["detail"])
        credit = float(outcome["credit"])
        components = {"value": float(outcome["value"]), "has_answer": 1.0}
        return RewardResult(credit, credit, components=components, extracted=answer)


def _nothing(status: Status, answer: str | None, detail: str) -> RewardResult:
    components = {"value": 0.0, "has_answer": float(answer is not None)}
    return RewardResult(0.0, 0.0, status, components, answer, detail=detail)


def oracle(entry: Mapping[str, Any]) -> str | None:
    """Return an answer that earns the full score: the item's own, or one from its metadata; None if it has none."""
    metadata = entry["metadata"]
    match metadata.get("source_dataset"):
        case "graph_color":
            answer = json.dumps(metadata["possible_answer"])
        case "propositional_logic":
            answer = metadata.get("example_answer")
        case "rubiks_cube":
            answer = metadata.get("example_correct_answer")
        case _:
            answer = entry["answer"]
    return answer if isinstance(answer, str) and answer else None


def entry_of(label: Any) -> dict[str, Any]:
    """Return the item in a label.

    Raises:
        DataError: there is none.
    """
    entry = label
    if isinstance(label, str):
        try:
            entry = json.loads(label)
        except (ValueError, RecursionError):
            entry = None
    metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
    if isinstance(entry, Mapping) and "answer" in entry and isinstance(metadata, Mapping):
        return dict(entry)
    raise DataError(
        f'label: expected an item of reasoning-gym, {{"question", "answer", "metadata"}}, got {label!r:.120}. '
        "Make the rows with `python -m agentenv_envs.reasoning_gym`."
    )


@functools.cache
def require_reasoning_gym() -> str:
    """Return the installed version of reasoning-gym, without importing it.

    Raises:
        MissingDependency: reasoning-gym is not installed.
    """
    try:
        return version("reasoning-gym")
    except PackageNotFoundError as error:
        raise MissingDependency(
            "reasoning_gym: expected the package reasoning-gym, got none. Run: pip install 'agentenv-rl[reasoning-gym]'"
        ) from error
