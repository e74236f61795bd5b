"""Long-lived daemon threads for plain functions that block: bounded, and one that never returns costs only itself."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from agentenv.agent import outside
from agentenv.deadlines import waiting
from agentenv.errors import InfraError

_MOST_ABANDONED = 64
_IDLE_S = 10.0
"""How long a thread waits for its next call before it ends: nobody has to close what holds none."""


class _Call:
    """One call, from the loop that waits for it to the thread that makes it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._function, self._context = function, contextvars.copy_context()
        self.started: asyncio.Future[Any] = self._loop.create_future()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        self.begun = self.over = self.left = False
        """The threads' lock guards these; `left` is one that nobody waits for any more."""

    def make(self) -> Callable[[], None]:
        """Call the function, in a thread; gives what then hands its answer, or its exception, over."""
        self._settle(self.started, None, None)
        result, error = None, None
        try:
            result = self._context.run(self._function)
        except BaseException as raised:  # noqa: BLE001 - carried to the caller, not handled here
            whole = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if whole else InfraError(f"function: expected an answer, got {raised!r}. Mend it.")
        return partial(self._settle, self.done, result, error)

    def _settle(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        def settle() -> None:
            """On the loop: unless nobody waits any more."""
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(settle)


class Threads:
    """Makes calls in at most `num_threads` threads, which start at first need and never hold up the process's end.

    A call that outlives its deadline is left behind: its thread ends when it returns, and another takes its place.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the counts below and the state of calls
        self._queue: SimpleQueue[_Call] = SimpleQueue()
        self._num_running = self._num_calls = 0
        self.num_abandoned = 0
        """Calls that were given up and have not returned yet."""

    def __reduce__(self) -> tuple[type[Threads], tuple[int]]:
        """Elsewhere it begins anew: threads and locks cannot be sent."""
        return Threads, (self._num_threads,)

    async def run(self, function: Callable[[], Any], *, limit_s: float) -> Any:
        """What the function gives; its time begins when a thread takes it.

        Raises:
            InfraError: it took longer, or so many calls never returned that no more are begun.
            BaseException: what it raised.
        """
        if self._pid != os.getpid():  # forked: the threads are the parent's
            self._forget()
        if self.num_abandoned >= _MOST_ABANDONED:
            raise InfraError(
                f"function: expected calls that return, got {self.num_abandoned} that did not. Use killable=True."
            )
        call = _Call(function)
        self._submit(call)
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                with waiting(), outside():
                    await call.started
                deadline.reschedule(asyncio.get_running_loop().time() + limit_s)
                with outside():
                    return await call.done
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise InfraError(f"function: expected an answer within {limit_s:g} s, got none. Raise limit_s.") from error
        finally:
            self._leave(call)
            if not call.done.cancel() and not call.done.cancelled():
                call.done.exception()  # it has been heard: asyncio logs those that were not

    def _submit(self, call: _Call) -> None:
        self._queue.put(call)
        with self._lock:
            self._num_calls += 1
            self._start_one()

    def _start_one(self) -> None:
        """Starts a thread if one has something to do; holds the lock."""
        if self._num_running < min(self._num_calls, self._num_threads):
            self._num_running += 1
            threading.Thread(target=self._work, name="agentenv-function", daemon=True).start()

    def _leave(self, call: _Call) -> None:
        with self._lock:
            call.left = True
            self._num_calls -= not call.over
            if call.begun and not call.over:
                self.num_abandoned += 1
                self._num_running -= 1
                self._start_one()

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
                if call.left:
                    continue
                call.begun = True
            hand_over = call.make()
            with self._lock:  # before its caller can hear of it, and leave
                call.over, left = True, call.left
                self.num_abandoned -= left
                self._num_calls -= not left
            hand_over()
            if left:
                return
