r"""Grades mathematical answers: extraction, an exact fast path, and math-verify in processes that can be killed.

Example:
    >>> async with MathGrader() as grader:
    ...     grade = await grader.grade("... so the answer is \\boxed{\\frac{1}{2}}.", "0.5")
    >>> grade.outcome, grade.extracted
    (<Outcome.CORRECT: 'correct'>, '\\frac{1}{2}')

A model writes the text, so it may hold `9^{9^{9^9}}`: no arithmetic on it happens in this process beyond reading plain
numbers. What the comparison accepts is described at `numbers_equal` (rounding) and in `_math_worker` (math-verify).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import Self

from agentenv.deadlines import waiting
from agentenv.errors import ConfigError, DataError
from agentenv.rewards._math_text import MAX_ANSWER_CHARS, extract_answer, parse_label, plain_verdict, quick_match
from agentenv.rewards.pool import WorkerFailed, WorkerPool, WorkerTimeout, shared_pool
from agentenv.rewards.types import Response, RewardResult, Status, is_finite

__all__ = [
    "Grade", "MathGrader", "MathReward", "Outcome", "default_grader", "extract_answer", "parse_label", "quick_match",
]  # fmt: skip


class Outcome(StrEnum):
    """How a check ended; INFRA says nothing about the answer and must not become a reward."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """The text commits to no final answer."""
    PARSE_ERROR = "parse_error"
    """The answer is not a number, an expression, or a text that could equal the gold."""
    TIMEOUT = "timeout"
    """Comparing the answer takes more computing or memory than allowed: the answer's property, like PARSE_ERROR."""
    INFRA = "infra"
    """The grader failed: nobody knows whether the answer is right."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The result of a check: `extracted` is the cleaned answer, `detail` says more, for people."""

    outcome: Outcome
    extracted: str | None = None
    detail: str = ""


_CACHED_OUTCOMES = frozenset({Outcome.CORRECT, Outcome.WRONG, Outcome.PARSE_ERROR, Outcome.TIMEOUT})
_Key = tuple[str, tuple[str, ...]]


class MathGrader:
    """Grades answers against labels from any event loop; its worker processes start at the first answer that needs one.

    Each event loop gets up to `num_workers` at a time. A check may take `timeout_s` CPU seconds, however long a busy
    machine needs for them: then it is interrupted inside the worker, which is killed one CPU second later if even that
    fails. A worker that gives no answer in `max(10 * timeout_s, 30)` seconds without having computed that much is lost:
    the check is done once more by a new one, and then is INFRA.

    Beyond `max_pending` checks, callers wait in line. A worker is replaced after `max_tasks_per_worker` checks. With a
    `pool`, these three are the pool's, and closing it is its owner's. The last `cache_size` results are remembered.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout_s: float = 2.0,
        *,
        max_pending: int = 1024,
        max_tasks_per_worker: int = 2000,
        cache_size: int = 4096,
        pool: WorkerPool | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._owns_pool = pool is None
        self._pool = pool or WorkerPool(
            num_workers=num_workers,
            cpu_limit_s=timeout_s,
            max_pending=max_pending,
            max_tasks_per_worker=max_tasks_per_worker,
        )
        self._cache_size = cache_size
        self._cache: dict[_Key, Grade] = {}
        self._cache_lock = Lock()  # guards the cache's order when event loops of several threads share the grader
        self._shared: dict[tuple[asyncio.AbstractEventLoop, _Key], asyncio.Future[Grade | None]] = {}

    async def grade(self, text: str, label: object) -> Grade:
        """Grades the final answer in `text`; concurrent checks of equal answers are done once.

        Raises:
            DataError: the label is no gold answer (see `parse_label`), or the answer had to be compared with one that
                looks mathematical and that math-verify cannot read, or not within `timeout_s`.
        """
        golds = parse_label(label)
        extracted = extract_answer(text)
        if extracted is None:
            return Grade(Outcome.NO_ANSWER)
        if len(extracted) > MAX_ANSWER_CHARS:
            return Grade(Outcome.PARSE_ERROR, extracted, f"the answer is longer than {MAX_ANSWER_CHARS} characters")
        verdicts = [plain_verdict(extracted, gold) for gold in golds]
        if True in verdicts:
            return Grade(Outcome.CORRECT, extracted)
        if None not in verdicts:
            return Grade(Outcome.WRONG, extracted)
        key = (extracted, golds)
        with self._cache_lock:
            cached = self._cache.pop(key, None)
            if cached is not None:
                self._cache[key] = cached  # moved to the young end
                return cached
        return await self._check_shared(key)

    async def _check_shared(self, key: _Key) -> Grade:
        """One check for all who ask; when the one who runs it is cancelled, another takes over."""
        loop = asyncio.get_running_loop()
        while (running := self._shared.get((loop, key))) is not None:
            with waiting():  # for another's check, which has its own limits
                grade = await asyncio.shield(running)
            if grade is not None:
                return grade
        future: asyncio.Future[Grade | None] = loop.create_future()
        self._shared[loop, key] = future
        grade = None
        try:
            grade = await self.check(*key)
            self._remember(key, grade)
            return grade
        finally:
            del self._shared[loop, key]
            future.set_result(grade)

    def _remember(self, key: _Key, grade: Grade) -> None:
        if grade.outcome not in _CACHED_OUTCOMES or self._cache_size <= 0:
            return
        with self._cache_lock:
            self._cache[key] = grade
            while len(self._cache) > self._cache_size:
                del self._cache[next(iter(self._cache))]

    async def check(self, answer: str, golds: tuple[str, ...]) -> Grade:
        """Has a worker compare a cleaned answer with cleaned golds: no fast path, no cache.

        Raises:
            DataError: no gold matches, and one of them cannot be read; see `grade`.
        """
        try:
            reply = await self._pool.run(
                {"task": "math", "answer": answer, "golds": golds}, cpu_limit_s=self._timeout_s
            )
        except WorkerTimeout as error:
            return Grade(Outcome.TIMEOUT, answer, str(error))
        except WorkerFailed as error:
            return Grade(Outcome.INFRA, answer, str(error))
        if reply.get("outcome") == "label":
            raise DataError(str(reply.get("detail")))
        try:
            return Grade(Outcome(reply["outcome"]), answer, str(reply["detail"]))
        except (KeyError, ValueError):
            return Grade(Outcome.INFRA, answer, f"a worker sent garbage: {str(reply)[:200]}")

    async def close(self) -> None:
        """Kills the workers, if they are its own, and waits for their end; a later `grade` starts new ones."""
        if self._owns_pool:
            await self._pool.close()

    def close_now(self) -> None:
        """Same as `close` without an event loop, for `atexit`."""
        if self._owns_pool:
            self._pool.close_now()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


_default: MathGrader | None = None


def default_grader() -> MathGrader:
    """The process-wide grader, made at the first call; it shares its workers with other rewards (`shared_pool`)."""
    global _default
    if _default is None:
        _default = MathGrader(pool=shared_pool())
    return _default


_STATUS = {
    Outcome.CORRECT: Status.OK,
    Outcome.WRONG: Status.OK,
    Outcome.NO_ANSWER: Status.NO_ANSWER,
    Outcome.PARSE_ERROR: Status.PARSE_ERROR,
    Outcome.TIMEOUT: Status.TIMEOUT,
}
_FEEDBACK = {
    Outcome.CORRECT: "The answer is right.",
    Outcome.WRONG: "The answer is not right.",
    Outcome.NO_ANSWER: r"No final answer was found. Put it into \boxed{}.",
    Outcome.PARSE_ERROR: "The final answer could not be read as a number or an expression.",
    Outcome.TIMEOUT: "The final answer takes too long to compare. Write it in a simpler form.",
}


class MathReward:
    """The final answer of a response against its label, a number, an expression or a list of them (see `parse_label`).

    The reward depends on how the check ended; the score is 1.0 where the answer is right, else 0.0. `grader` is the
    process-wide one unless given.

    Components: correct (0/1), has_answer (0/1).

    Raises:
        ConfigError: a reward is no finite number.
    """

    def __init__(
        self,
        *,
        correct: float = 1.0,
        wrong: float = 0.0,
        no_answer: float = 0.0,
        parse_error: float = 0.0,
        timeout: float = 0.0,
        grader: MathGrader | None = None,
    ) -> None:
        rewards = (correct, wrong, no_answer, parse_error, timeout)
        for outcome, reward in zip(_STATUS, rewards, strict=True):
            if isinstance(reward, bool) or not is_finite(reward):
                raise ConfigError(f"MathReward.{outcome}: expected a finite number, got {reward!r}. Change it.")
        self._rewards = dict(zip(_STATUS, rewards, strict=True))
        self._grader = grader

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest reward that it can give."""
        return min(self._rewards.values()), max(self._rewards.values())

    async def grade(self, response: Response) -> RewardResult:
        """What the response's final answer is worth.

        Raises:
            DataError: the label is no answer, or cannot be compared with one.
        """
        grade = await (self._grader or default_grader()).grade(response.text, response.label)
        if grade.outcome is Outcome.INFRA:
            return RewardResult.failed(f"MathReward: {grade.detail}")
        correct = float(grade.outcome is Outcome.CORRECT)
        return RewardResult(
            self._rewards[grade.outcome],
            score=correct,
            status=_STATUS[grade.outcome],
            components={"correct": correct, "has_answer": float(grade.extracted is not None)},
            extracted=grade.extracted,
            feedback=_FEEDBACK[grade.outcome],
            detail=grade.detail,
        )
