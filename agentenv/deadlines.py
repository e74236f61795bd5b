"""Deadlines on what others do: an agent's methods, an engine's generations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from agentenv.agent import Engine, call
from agentenv.errors import EngineError
from agentenv.types import Completion, SamplingParams

_MAX_LOGPROB = 1e-3
"""Rounding, and no more, may take an engine's log-probability above 0."""
_CANCEL_GRACE_S = 1.0
"""Time for a cancelled call of an agent to let go of what it holds."""


class StepTimeout(Exception):
    """A method of the agent took longer than it may."""


class _Clock:
    """Ends a wait after so long, less the time in which it stands still."""

    def __init__(self, limit_s: float, end: Callable[[None], None], outer: _Clock | None) -> None:
        self._loop, self._outer = asyncio.get_running_loop(), outer
        self._end, self._left_s, self._waits = end, limit_s, 0
        self._timer = self._loop.call_later(limit_s, end, None)
        self.over = False

    @contextmanager
    def still(self) -> Iterator[None]:
        """Stand still in here, as the clock around this one does; where several wait, until the last goes on."""
        self._waits += 1
        if self._waits == 1 and not self.over:
            self._left_s = self._timer.when() - self._loop.time()
            self._timer.cancel()
        try:
            with nullcontext() if self._outer is None else self._outer.still():
                yield
        finally:
            self._waits -= 1
            if not self._waits and not self.over:
                self._timer = self._loop.call_later(max(self._left_s, 0.0), self._end, None)

    def cancel(self) -> None:
        """End nothing any more."""
        self.over = True
        self._timer.cancel()


_CLOCK: ContextVar[_Clock | None] = ContextVar("clock", default=None)


def waiting() -> AbstractContextManager[object]:
    """While a method of an agent waits for its turn among others, in here, no time of its limit goes by."""
    clock = _CLOCK.get()
    return nullcontext() if clock is None else clock.still()


async def bounded(method: Callable[..., Any], *args: Any, limit_s: float, flag: str = "step_timeout_s") -> Any:
    """Call a method of an agent, for at most `limit_s`, which is the limit of that name.

    It runs in a task of its own: one that ignores being cancelled is left behind and holds nobody up.

    Raises:
        StepTimeout: it took longer.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()  # as asyncio.wait does, for one task only: this is every turn's

    def end(_: Any) -> None:
        """Wake the caller: the work is done, or its time is up."""
        if not over.done():
            over.set_result(None)

    clock = _Clock(limit_s, end, _CLOCK.get())
    outer = _CLOCK.set(clock)
    work = loop.create_task(call(method, *args))
    _CLOCK.reset(outer)
    work.add_done_callback(_forget)
    work.add_done_callback(end)
    try:
        await over
        if work.done():
            return work.result()
    finally:
        clock.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
    name = getattr(method, "__qualname__", repr(method))
    raise StepTimeout(f"{name}: expected an answer within {limit_s:g} s, got none. Raise {flag}.")


def _forget(work: asyncio.Future[Any]) -> None:
    # Of a call that was given up nobody asks for the exception, which asyncio would complain about.
    if not work.cancelled():
        work.exception()


async def sample(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams, *, request_id: str, limit_s: float
) -> Completion:
    """One call of an engine, for at most `limit_s`; what it gives can be recorded, or was aborted.

    Raises:
        EngineError: the engine gave up, took longer, or gave what no record can hold.
    """
    try:
        async with asyncio.timeout(limit_s) as deadline:
            completion = await engine.generate(prompt, sampling, request_id=request_id)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EngineError(
            f"generate: expected a completion within {limit_s:g} s, got none. "
            "Look at the engine, or raise generate_timeout_s."
        ) from error
    _check(completion, sampling.max_tokens)
    return completion


def _check(completion: Completion, max_tokens: int | None) -> None:
    num, logprobs = len(completion.token_ids), completion.logprobs
    if completion.finish_reason == "error":
        raise EngineError("generate: expected a completion, got finish reason 'error'. Look at the engine's log.")
    if max_tokens is not None and num > max_tokens:
        raise EngineError(f"generate: expected at most max_tokens={max_tokens} tokens, got {num}. Mend the engine.")
    _check_logprobs(logprobs or ())
    if logprobs is not None and len(logprobs) != num:
        raise EngineError(f"generate: expected {num} log-probabilities, got {len(logprobs)}. Mend the engine.")


def _check_logprobs(logprobs: Sequence[float]) -> None:
    # At the speed of C first: where the sum is finite no value is NaN or infinite, and `max` can be trusted.
    if math.isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= _MAX_LOGPROB:
        return
    wrong = [x for x in logprobs if x > _MAX_LOGPROB or x == -math.inf]
    if wrong:
        raise EngineError(
            f"generate: expected log-probabilities, finite and at most 0, got {wrong[0]!r}. Mend the engine."
        )
