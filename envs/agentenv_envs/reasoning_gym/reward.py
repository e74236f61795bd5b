"""The score of an answer to an item of reasoning-gym, as a reward."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerPool, WorkerTimeout, shared_pool
from agentenv_envs.reasoning_gym.answers import FORMS, AnswerForm, extract
from agentenv_envs.reasoning_gym.scoring import request_of


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
        pool: WorkerPool | None = None,
    ) -> None:
        """Set the options; nothing is started.

        Args:
            answer: the form of an answer: tag, boxed, or auto for either.
            partial_credit: reward nearly right answers.
            max_answer_chars: longer answers are not scored; the longest right ones have about 5,000.
            cpu_limit_s: CPU time for a scorer.
            pool: worker processes; by default those that all rewards share.

        Raises:
            ConfigError: a value is out of range.
            MissingDependency: reasoning-gym is not installed.
        """
        _check("answer", answer in FORMS, f"one of {', '.join(FORMS)}", answer)
        for name, number in (("max_answer_chars", max_answer_chars), ("cpu_limit_s", cpu_limit_s)):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            _check(name, is_number and 0 < number < float("inf"), "a number > 0", number)
        require_reasoning_gym()
        self._form = answer
        self._partial = bool(partial_credit)
        self._max_chars = max_answer_chars
        self._cpu_s = float(cpu_limit_s)
        self._pool = pool

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
            outcome = await (self._pool or shared_pool()).run(
                request_of(entry, answer, partial=self._partial), cpu_limit_s=self._cpu_s
            )
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


def _check(name: str, holds: bool, expected: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"ReasoningGym.{name}: expected {expected}, got {value!r}. Change it.")
