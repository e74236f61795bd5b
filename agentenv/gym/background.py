"""One event loop in one daemon thread per process, so that plain calls work wherever they are made.

Jupyter and Ray's async actors have a loop running already, in which no plain `reset` or `step` could wait for an async
environment; and what environments share (workers, connections) must stay with one loop. A forked process gets its own.
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
_LOCK = threading.Lock()
_EXIT_GRACE_S = 2.0
"""Time at the interpreter's end for environments to close."""


class _Background:
    """The loop of this process, and who runs it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._awaited: set[concurrent.futures.Future[Any]] = set()
        self.ended = False
        self.thread = threading.Thread(target=self._run, name="agentenv-gym", daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work`; where the loop ends first, its future says so."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        if self.ended:  # meanwhile
            self._give_up()
        return future

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while True:
                # What interrupts or stops the loop is one task's doing: its own caller is told, and the others go on.
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self.loop.run_forever()
        finally:
            self.ended = True
            self._give_up()

    def _give_up(self) -> None:
        for future in list(self._awaited):
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was done just now
                future.set_exception(
                    ContractError(
                        "agentenv.gym: expected the background loop to go on, got one that broke, as its thread says. "
                        "Mend what the environment does to its event loop, and call reset."
                    )
                )


_current: _Background | None = None
_closing: set[concurrent.futures.Future[None]] = set()


def _background() -> _Background:
    """That of this process; made at the first call. After a fork the parent's is left alone: its thread is not here."""
    global _current
    found = _current
    if found is not None and found.pid == os.getpid() and not found.ended:
        return found
    with _LOCK:
        if _current is None or _current.pid != os.getpid() or _current.ended:
            _current = _Background()
        return _current


def _start_anew() -> None:
    global _LOCK
    _LOCK = threading.Lock()  # another thread may have held it
    _closing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start `work` on the background loop and come back at once."""
    return _background().submit(work)


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on the background loop and wait for what it gives; what interrupts the wait cancels the work.

    Raises:
        ContractError: the caller is the background loop itself, which would wait for itself for ever; or the loop
            broke.
    """
    background = _background()
    if threading.current_thread() is background.thread:
        work.close()
        raise ContractError(
            "agentenv.gym: expected a call from outside the background loop, got one from an environment's own code. "
            "Await EpisodeMaker.begin and act there."
        )
    future = background.submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def later(work: Coroutine[Any, Any, None]) -> None:
    """Start `work` that nobody waits for; the end of the interpreter does, for a short while."""
    future = submit(work)
    _closing.add(future)
    future.add_done_callback(_closing.discard)


@atexit.register
def _drain() -> None:
    concurrent.futures.wait(list(_closing), timeout=_EXIT_GRACE_S)
