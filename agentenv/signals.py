"""What Ctrl-C, SIGTERM and a closed terminal do to a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible(
    drain: Callable[[], str],
    work: asyncio.Future[Any],
    grace_s: float,
    note: Callable[[str], None],
    *,
    closing_s: float = 0.0,
) -> Iterator[list[int]]:
    """Signals end `work`: the first calls `drain` and lets what that names finish for `grace_s`, the second cancels.
    Work that ends what is left by itself then has `closing_s` more for it.

    The third kills the process, whatever hangs, the event loop among it: signals are counted where Python handles them,
    not on the loop. Gives the list of the signals that came. SIGHUP counts when it is the first, unless `nohup` has it
    ignored.
    """
    loop, received = asyncio.get_running_loop(), list[int]()
    numbers = [each for each in _NUMBERS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]

    def first(number: int) -> None:
        """What the first signal does, on the loop."""
        left = drain()
        loop.call_later(grace_s + closing_s, work.cancel)
        note(f"{signal.Signals(number).name}: finishing {left}, at most {grace_s:g} s. Once more cancels.")

    def arrived(number: int, frame: FrameType | None) -> None:
        """Drain at the first signal, cancel at the second."""
        if number == signal.SIGHUP and received:
            return  # a terminal that closes sends it twice: through the shell, and when the shell is gone
        received.append(number)
        if len(received) == 1:
            loop.call_soon_threadsafe(first, number)
            return
        loop.call_soon_threadsafe(work.cancel)
        # From now on the signal does what it always does: whatever hangs, one more ends the process.
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, arrived) for number in numbers}
    try:
        yield received
    finally:
        if len(received) < 2:
            for number, handler in before.items():
                signal.signal(number, handler)
