r"""Grade mathematical answers: extraction, an exact fast path, and math-verify in processes that can be killed.

Example:
    >>> await MathGrader().grade(r"The answer is \boxed{\frac{1}{2}}.", label="0.5")
    RewardResult(reward=1.0, score=1.0, status=<Status.OK: 'ok'>, …, extracted='\\frac{1}{2}', …)
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import Self

from agentenv._util.calls import waiting
from agentenv.core.arguments import number
from agentenv.rewards.rules.math.answers import (
    MAX_ANSWER_CHARS,
    extract_answer,
    extract_boxes,
    is_list,
    parse_label,
    plain_verdict,
)
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerFailed, WorkerPool, WorkerTimeout, shared_pool

__all__ = ["MathGrader", "MathReward", "default_grader", "extract_answer", "math_outcome", "parse_label"]

_CACHED = frozenset({Status.OK, Status.PARSE_ERROR, Status.TIMEOUT})
_FEEDBACK = {
    Status.NO_ANSWER: r"No final answer was found. Put it into \boxed{}.",
    Status.PARSE_ERROR: "The final answer could not be read as a number or an expression.",
    Status.TIMEOUT: "The final answer takes too long to compare. Write it in a simpler form.",
}
_Key = tuple[str, tuple[str, ...]]


def _result(status: Status, *, correct: bool = False, extracted: str | None = None, detail: str = "") -> RewardResult:
    if not status.valid:
        return RewardResult(None, status=status, extracted=extracted, detail=detail)
    return RewardResult(
        float(correct),
        score=float(correct),
        status=status,
        components={"correct": float(correct), "has_answer": float(extracted is not None)},
        extracted=extracted,
        feedback=_FEEDBACK.get(status, "The answer is right." if correct else "The answer is not right."),
        detail=detail,
    )


class MathGrader:
    """A grader of answers against labels, from any event loop; workers start at the first answer that needs one.

    Each event loop gets up to `num_workers` concurrently. A check may take `timeout_s` CPU seconds, however long a busy
    machine needs for them: then it is interrupted inside the worker, which is killed one CPU second later if even that
    fails. A worker that sends no answer in `max(10 * timeout_s, 30)` seconds without having computed that much is lost:
    a new one repeats the check once, and then the status is INFRA.

    A `pool` has its own number of workers and limits, and its owner closes it. The last `cache_size` results are
    cached.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout_s: float = 2.0,
        *,
        cache_size: int = 4096,
        pool: WorkerPool | None = None,
    ) -> None:
        self._timeout_s = number("MathGrader.timeout_s", timeout_s, low=1e-6)
        self._owns_pool = pool is None
        self._pool = pool or WorkerPool(num_workers=num_workers)
        self._cache_size = cache_size
        self._cache: dict[_Key, RewardResult] = {}
        self._cache_lock = Lock()  # guards the cache's order when event loops of several threads share the grader
        self._running: dict[tuple[asyncio.AbstractEventLoop, _Key], asyncio.Future[RewardResult | None]] = {}

    async def grade(self, text: str, label: object) -> RewardResult:
        """Grade the final answer in `text`; concurrent checks of equal answers run once.

        It is what `extract_answer` returns; if a label has several values, the last boxes that stand together count.

        The score is 1.0 if the answer is right, else 0.0. The status is PARSE_ERROR if the answer is not a number, an
        expression, or a text that could equal the label, and TIMEOUT if comparing it takes too much computing or
        memory.

        Raises:
            DataError: the label is not an answer (see `parse_label`), or the answer had to be compared with a label
                that looks mathematical and that math-verify cannot read, or not within `timeout_s`.
        """
        golds = parse_label(label)
        extracted = extract_answer(text)
        if (together := extract_boxes(text)) and any(map(is_list, golds)):
            extracted = together
        if extracted is None:
            return _result(Status.NO_ANSWER)
        if len(extracted) > MAX_ANSWER_CHARS:
            detail = f"the answer is longer than {MAX_ANSWER_CHARS} characters"
            return _result(Status.PARSE_ERROR, extracted=extracted, detail=detail)
        verdicts = [plain_verdict(extracted, gold) for gold in golds]
        if True in verdicts or None not in verdicts:
            return _result(Status.OK, correct=True in verdicts, extracted=extracted)
        key = (extracted, golds)
        with self._cache_lock:
            cached = self._cache.pop(key, None)
            if cached is not None:
                self._cache[key] = cached  # moved to the young end
                return cached
        return await self._check_once(key)

    async def check_label(self, label: object) -> None:
        """Raise DataError if the label is not an answer, or cannot be compared with one: 0 is compared with it."""
        await self.grade(r"\boxed{0}", label)

    async def _check_once(self, key: _Key) -> RewardResult:
        """Share one check among all callers; if the caller that runs it is cancelled, another takes over."""
        loop = asyncio.get_running_loop()
        while (running := self._running.get((loop, key))) is not None:
            with waiting():  # for another caller's check, which has its own limits
                result = await asyncio.shield(running)
            if result is not None:
                return result
        future: asyncio.Future[RewardResult | None] = loop.create_future()
        self._running[loop, key] = future
        result = None
        try:
            result = await self.check(*key)
            if result.status in _CACHED and self._cache_size > 0:
                with self._cache_lock:
                    self._cache[key] = result
                    while len(self._cache) > self._cache_size:
                        del self._cache[next(iter(self._cache))]
            return result
        finally:
            del self._running[loop, key]
            future.set_result(result)

    async def check(self, answer: str, golds: tuple[str, ...]) -> RewardResult:
        """Compare a cleaned answer with cleaned golds in a worker: no fast path, no cache.

        Raises:
            DataError: no gold matches, and one of them cannot be read; see `grade`.
        """
        request = {"task": "agentenv.rewards.rules.math.worker:handle", "answer": answer, "golds": golds}
        try:
            reply = await self._pool.run(request, cpu_limit_s=self._timeout_s)
        except WorkerTimeout as error:
            return _result(Status.TIMEOUT, extracted=answer, detail=str(error))
        except WorkerFailed as error:
            return _result(Status.INFRA, extracted=answer, detail=str(error))
        try:
            correct, detail = reply["correct"] is True, str(reply["detail"])
            return _result(Status(reply["status"]), correct=correct, extracted=answer, detail=detail)
        except (KeyError, ValueError):
            detail = f"a worker sent garbage: {str(reply)[:200]}"
            return _result(Status.INFRA, extracted=answer, detail=detail)

    async def close(self) -> None:
        """Kill the workers, unless the pool is shared, and wait for their end; a later `grade` starts new ones."""
        if self._owns_pool:
            await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@cache
def default_grader() -> MathGrader:
    """Return the process-wide grader, created at the first call; it shares workers with other rewards."""
    return MathGrader(pool=shared_pool())


class MathReward:
    """The final answer of a response against its label: a number, an expression or a list of them (`parse_label`).

    The reward depends on how the check ended; the score is 1.0 if the answer is right, else 0.0. `grader` defaults to
    the process-wide one.

    Components: correct (0/1), has_answer (0/1).

    Raises:
        ConfigError: a reward is not a finite number.
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
        names = ("correct", "wrong", "no_answer", "parse_error", "timeout")
        rewards = zip(names, (correct, wrong, no_answer, parse_error, timeout), strict=True)
        self._rewards = {name: number(f"MathReward.{name}", reward) for name, reward in rewards}
        self._grader = grader
        self.bounds = (min(self._rewards.values()), max(self._rewards.values()))

    async def check_row(self, row: Response) -> None:
        """Raise DataError if the label is not an answer, or cannot be compared with one; see `grading.check_row`."""
        await (self._grader or default_grader()).check_label(row.label)

    async def grade(self, response: Response) -> RewardResult:
        """Return the reward of the response's final answer.

        Raises:
            DataError: the label is not an answer, or cannot be compared with one.
        """
        text = with_opened_thought(response.text, response.prompt)
        result = await (self._grader or default_grader()).grade(text, response.label)
        if result.status is Status.INFRA:
            return RewardResult.failed(f"MathReward: {result.detail}")
        return replace(result, reward=self._rewards[math_outcome(result)])


def math_outcome(result: RewardResult) -> str:
    """Return `correct` or `wrong` for a result of a MathGrader of status OK, else its status."""
    if result.status is not Status.OK:
        return result.status.value
    return "correct" if result.score == 1.0 else "wrong"
