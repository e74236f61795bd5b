"""Handling of Ctrl-C, SIGTERM and a closed terminal during a run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from agentenv._util.plurals import counted
from agentenv.errors import AgentEnvError
from agentenv.runs.watchdog import Watchdog

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_event() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set from now on; a second one cancels the current task."""
    loop, stopped, task = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stopped.is_set():
            task.cancel()
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stopped


@contextmanager
def interruptible(
    drain: Callable[[], str],
    work: asyncio.Future[Any],
    grace_s: float,
    note: Callable[[str], None],
    *,
    closing_s: float = 0.0,
) -> Iterator[list[int]]:
    """Let signals end `work`, and yield the list of the signals received.

    The first signal calls `drain`, which returns a description of the work in progress, and cancels `work` after
    `grace_s`, plus `closing_s` for work that ends the rest itself. The second cancels it immediately. The third kills
    the process even if the event loop hangs, because signals are counted where Python handles them. SIGHUP counts only
    as the first signal, and not under `nohup`.
    """
    loop, received = asyncio.get_running_loop(), list[int]()
    numbers = [each for each in _NUMBERS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]

    def on_first_signal(number: int) -> None:
        left = drain()
        loop.call_later(grace_s + closing_s, work.cancel)
        note(f"{signal.Signals(number).name}: finishing {left}, at most {grace_s:g} s. Once more cancels.")

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and received:
            return  # a terminal that closes sends it twice: through the shell, and when the shell is gone
        received.append(number)
        if len(received) == 1:
            loop.call_soon_threadsafe(on_first_signal, number)
            return
        loop.call_soon_threadsafe(work.cancel)
        # Restore the default action, so that one more signal ends the process even if it hangs.
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield received
    finally:
        if len(received) < 2:
            for number, handler in before.items():
                signal.signal(number, handler)


_END_GRACE_S = 5.0
"""Longest wait at the end for cancelled calls."""


async def then_end(work: Awaitable[int], stdout: TextIO) -> int:
    """Return the exit code of `work`, without waiting for calls of an environment that ignore cancellation."""
    code, failure = 0, None
    try:
        code = await work
    except AgentEnvError as error:
        code, failure = error.exit_code, error
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    stuck = (await asyncio.wait(left, timeout=_END_GRACE_S))[1] if left else set()
    if stuck:
        names = ", ".join(sorted({getattr(task.get_coro(), "__qualname__", "?") for task in stuck}))
        sys.stderr.write(
            f"agentenv: {counted(len(stuck), 'call')} ignored cancellation ({names}); ending without them\n"
        )
        if failure is not None:
            sys.stderr.write(f"agentenv: error: {' '.join(str(failure).split())}\n")
        stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if failure is not None:
        raise failure
    return code


async def until_signal(
    work: asyncio.Future[Any], watchdog: Watchdog, drain: Callable[[], str], *, grace_s: float
) -> list[int]:
    """Await `work` with the watchdog and signal handling, and return the signals received."""
    with watchdog, interruptible(drain, work, grace_s, watchdog.tell) as signals:
        try:
            await watchdog.guard(work)
        except asyncio.CancelledError:
            if not signals:
                raise
    return signals
