"""The score of an answer to an item of reasoning-gym, as a reward: text in, a typed result out."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.rewards.pool import WorkerPool, WorkerTimeout, shared_pool
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv_envs.reasoning_gym.answers import FORMS, AnswerForm, extract
from agentenv_envs.reasoning_gym.scoring import request_of


class ReasoningGymReward:
    r"""What the last `<answer>…</answer>` of a response, or its last `\boxed{…}`, is worth to the item's own scorer.

    The label is the item as its dataset made it: `{"question", "answer", "metadata"}`, an object or JSON of one. All
    scorers run in worker processes with limits; the workers are those of the library's own rewards.

    Reward and score: 1.0 where the scorer gives its full score, else 0.0; with `partial_credit` what the scorer gives,
    but nothing for what no answer has too, or for containing the right answer. No answer is worth 0.0.
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
        """Nothing starts yet.

        Args:
            answer: how an answer is given: tag, boxed, or auto for either.
            partial_credit: reward what is not quite right.
            max_answer_chars: longer answers are not scored; the longest right ones have some 5,000.
            cpu_limit_s: the most that a scorer may compute.
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
        self._form, self._partial = answer, bool(partial_credit)
        self._max_chars, self._cpu_s, self._pool = max_answer_chars, float(cpu_limit_s), pool

    async def grade(self, response: Response) -> RewardResult:
        """What the response is worth.

        Raises:
            DataError: the label is no item of these datasets.
            InfraError: the workers failed.
        """
        entry = entry_of(response.label)
        answer = extract(response.text, self._form)
        if answer is None:
            return _nothing(Status.NO_ANSWER, None, "the response commits to no answer")
        if len(answer) > self._max_chars:
            detail = f"the answer has {len(answer)} characters, of which {self._max_chars} may be scored"
            return _nothing(Status.PARSE_ERROR, answer[:200], detail)
        try:
            found = await (self._pool or shared_pool()).run(
                request_of(entry, answer, partial=self._partial, cpu_s=self._cpu_s),
                cpu_limit_s=self._cpu_s,
            )
        except WorkerTimeout as error:
            return _nothing(Status.TIMEOUT, answer, str(error))
        if found["outcome"] != "scored":
            return _nothing(Status(found["outcome"]), answer, found["detail"])
        credit = float(found["credit"])
        components = {"value": float(found["value"]), "has_answer": 1.0}
        return RewardResult(credit, credit, components=components, extracted=answer)


def _nothing(status: Status, answer: str | None, detail: str) -> RewardResult:
    components = {"value": 0.0, "has_answer": float(answer is not None)}
    return RewardResult(0.0, 0.0, status, components, answer, detail=detail)


def entry_of(label: Any) -> dict[str, Any]:
    """The item in a label.

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


def require_reasoning_gym() -> str:
    """The version of reasoning-gym that is installed; nothing of it is imported.

    Raises:
        MissingDependency: none is.
    """
    try:
        return _installed()
    except PackageNotFoundError as error:
        raise MissingDependency(
            "reasoning_gym: expected the package reasoning-gym, got none. Run: pip install 'agentenv[reasoning-gym]'"
        ) from error


@functools.cache
def _installed() -> str:
    return version("reasoning-gym")


def _check(name: str, holds: bool, expected: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"ReasoningGym.{name}: expected {expected}, got {value!r}. Change it.")
