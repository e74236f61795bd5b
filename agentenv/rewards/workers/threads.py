"""Run blocking functions in a bounded number of daemon threads; a call that never returns loses only its thread."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import isfinite
from queue import Empty, SimpleQueue
from typing import Any

from agentenv._util.calls import waiting
from agentenv._util.virtual_time import external_work
from agentenv.errors import InfraError

_MOST_ABANDONED = 64
_IDLE_S = 10.0
"""Time that a thread waits for its next call before it ends, so that threads need no close."""


class _ThreadCall:
    """One call, from the event loop that waits for it to the thread that runs it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._context = contextvars.copy_context()
        self.started: asyncio.Future[Any] = self._loop.create_future()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        self.started_in_thread = self.over = self.abandoned = False
        """The threads' lock guards these; an abandoned call has no waiting caller any more."""

    def run(self) -> Callable[[], None]:
        """Call the function, in a thread; return a function that hands over its result or exception."""
        self._settle(self.started, None, None)
        result, error = None, None
        try:
            result = self._context.run(self._function)
        except BaseException as raised:  # noqa: BLE001 - carried to the caller, not handled here
            can_cross = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if can_cross else RuntimeError(f"function: expected an answer, got {raised!r}.")
        return partial(self._settle, self.done, result, error)

    def _settle(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(settle)


@asynccontextmanager
async def _limited(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    try:
        async with asyncio.timeout(limit_s if isfinite(limit_s) else None) as deadline:
            yield deadline
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise InfraError(f"function: expected an answer within {limit_s:g} s, got none. Raise limit_s.") from error


class Threads:
    """At most `num_threads` threads, which start on demand and never delay the end of the process.

    A call that exceeds its deadline is abandoned: its thread ends when it returns, and another takes its place.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the counts below and the state of calls
        self._queue: SimpleQueue[_ThreadCall] = SimpleQueue()
        self._num_running = self._num_calls = 0
        self.num_abandoned = 0
        """Abandoned calls that have not returned yet."""

    def __reduce__(self) -> tuple[type[Threads], tuple[int]]:
        """Pickle without threads and locks."""
        return Threads, (self._num_threads,)

    async def call(self, function: Callable[..., Any], work: Callable[[], Any], *, limit_s: float) -> Any:
        """Return what `work`, which calls the function, returns: on the event loop if the function is async.

        What a plain function leaves to be awaited has as much time again. Raises as `run`.
        """
        value = work() if inspect.iscoroutinefunction(function) else await self.run(work, limit_s=limit_s)
        if not inspect.isawaitable(value):
            return value
        async with _limited(limit_s):
            return await value

    async def run(self, function: Callable[[], Any], *, limit_s: float) -> Any:
        """Return the function's result; its time limit starts when a thread takes it.

        Raises:
            InfraError: it took longer, or too many calls never returned to start another.
            BaseException: what it raised.
        """
        if self._pid != os.getpid():  # forked: the threads are the parent's
            self._reset()
        if self.num_abandoned >= _MOST_ABANDONED:
            raise InfraError(
                f"function: expected calls that return, got {self.num_abandoned} that did not. Use killable=True."
            )
        call = _ThreadCall(function)
        self._queue.put(call)
        with self._lock:
            self._num_calls += 1
            self._start_one()
        try:
            async with _limited(limit_s) as deadline:
                deadline.reschedule(None)
                with waiting(), external_work():
                    await call.started
                deadline.reschedule(asyncio.get_running_loop().time() + limit_s)
                with external_work():
                    return await call.done
        finally:
            with self._lock:
                call.abandoned = True
                self._num_calls -= not call.over
                if call.started_in_thread and not call.over:
                    self.num_abandoned += 1
                    self._num_running -= 1
                    self._start_one()
            if not call.done.cancel() and not call.done.cancelled():
                call.done.exception()  # marks it as retrieved: asyncio logs those that were not

    def _start_one(self) -> None:
        """Start a thread if there is a call for it; the caller holds the lock."""
        if self._num_running < min(self._num_calls, self._num_threads):
            self._num_running += 1
            threading.Thread(target=self._work, name="agentenv-function", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                call = self._queue.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if not self._queue.empty():  # it came meanwhile, when this thread still counted
                        continue
                    self._num_running -= 1
                    return
            with self._lock:
                if call.abandoned:
                    continue
                call.started_in_thread = True
            hand_over = call.run()
            with self._lock:  # before its caller can get the result, and leave
                call.over, abandoned = True, call.abandoned
                self.num_abandoned -= abandoned
                self._num_calls -= not abandoned
            hand_over()
            if abandoned:
                return
