"""Event loops in daemon threads, so that plain functions can wait for async code wherever they are called.

`asyncio.run` cannot do that: it refuses inside a running loop (Jupyter, async actors of Ray), and each call would end
the loop that pools, clients and semaphores belong to. Functions of this module share one loop per process.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentenv.errors import ContractError

T = TypeVar("T")
_EXIT_GRACE_S = 2.0
"""Time for detached work when the interpreter exits."""


class LoopThread:
    """An event loop in a daemon thread, which never keeps the process from exiting.

    If work raises KeyboardInterrupt or SystemExit, or stops the loop, only its own caller notices. If the loop breaks,
    all waiting callers get a ContractError.
    """

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.ended = False
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._closing:
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self._loop.run_forever()
        finally:
            self.ended = True
            self._fail_pending()

    def _fail_pending(self) -> None:
        text = f"{self._name}: expected the background loop to continue, got one that broke; the traceback of its "
        text += "thread says why. Fix the code that broke it, and call again."
        for future in list(self._pending):
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was completed just now
                future.set_exception(ContractError(text))

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` and return its future."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self.ended:  # it may have ended after the check of the caller
            self._fail_pending()
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; an interrupted wait, as by Ctrl-C, cancels the work.

        Raises:
            ContractError: the caller is this loop, which would wait for itself; or the loop broke.
            BaseException: raised by the work.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise ContractError(
                f"{self._name}: expected a call from outside the background loop, got one from its own thread. "
                "Await it instead."
            )
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # no effect on a future that is done

    def close(self, timeout_s: float) -> None:
        """Stop the loop and end the thread."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=timeout_s)
        if not self._thread.is_alive():
            self._loop.close()


_lock = threading.Lock()  # guards _shared: several threads may call first
_shared: LoopThread | None = None
_detached: set[concurrent.futures.Future[None]] = set()


def _shared_loop() -> LoopThread:
    """Return the loop of this process. A forked process makes its own, since the parent's thread is not in it."""
    global _shared
    with _lock:
        if _shared is None or _shared.pid != os.getpid() or _shared.ended:
            _shared = LoopThread("agentenv-background")
        return _shared


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    _detached.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start `work` on the shared loop and return its future."""
    return _shared_loop().submit(work)


def is_loop_running() -> bool:
    """Return True in a thread whose event loop runs.

    Work that begins in an `except` of its absence would give all its errors a RuntimeError as their context.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, run on the shared loop; see `LoopThread.run`."""
    return _shared_loop().run(work)


def submit_detached(work: Coroutine[Any, Any, None]) -> None:
    """Start `work` whose result is not needed; only the interpreter's exit waits for it, for a short while."""
    future = submit(work)
    _detached.add(future)
    future.add_done_callback(_detached.discard)


@atexit.register
def _wait_for_detached() -> None:
    concurrent.futures.wait(list(_detached), timeout=_EXIT_GRACE_S)
