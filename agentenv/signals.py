"""What Ctrl-C, SIGTERM and a closed terminal do to a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from agentenv.runner import EpisodeRunner

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible(
    runner: EpisodeRunner, work: asyncio.Future[None], grace_s: float, note: Callable[[str], None]
) -> Iterator[list[int]]:
    """Signals end the run: the first lets episodes in flight finish for `grace_s`, the second cancels them.

    The third kills the process, whatever hangs, the event loop among it: signals are counted where Python handles them,
    not on the loop. Gives the list of the signals that came. SIGHUP counts when it is the first, unless `nohup` has it
    ignored.
    """
    loop, received = asyncio.get_running_loop(), list[int]()
    numbers = [each for each in _NUMBERS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]

    def drain(number: int) -> None:
        """What the first signal does, on the loop."""
        runner.drain()
        loop.call_later(grace_s, work.cancel)
        name, num = signal.Signals(number).name, len(runner.in_flight)
        note(f"{name}: finishing {num} episodes in flight, at most {grace_s:g} s. Once more cancels them.")

    def arrived(number: int, frame: FrameType | None) -> None:
        """Drain at the first signal, cancel at the second."""
        if number == signal.SIGHUP and received:
            return  # a terminal that closes sends it twice: through the shell, and when the shell is gone
        received.append(number)
        if len(received) == 1:
            loop.call_soon_threadsafe(drain, number)
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
