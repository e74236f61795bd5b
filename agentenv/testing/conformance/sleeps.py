"""Finds `time.sleep` in calls on the event loop, and shortens it: a check need not wait for a plain fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from unittest.mock import patch

BLOCKS_S = 0.05
"""Maximum time that a call may run without awaiting."""
_SLEEP = time.sleep
_RECORDERS: list[Callable[[float], bool]] = []


def _sleep(seconds: float) -> None:
    """Sleep as `time.sleep` does, but not for long in a thread whose event loop runs while there is a recorder.

    Modules that import `sleep` by its name keep this function.
    """
    is_blocking = seconds > BLOCKS_S and asyncio._get_running_loop() is not None
    _SLEEP(0.0 if is_blocking and _RECORDERS and _RECORDERS[-1](seconds) else seconds)


@contextmanager
def shortened_sleeps(record: Callable[[float], bool]) -> Iterator[None]:
    """Pass the seconds of each `time.sleep` on an event loop to `record`, and leave it out if that returns True."""
    _RECORDERS.append(record)
    try:
        with patch.object(time, "sleep", _sleep):
            yield
    finally:
        _RECORDERS.remove(record)


def line_in(file: str, frame: FrameType | None) -> int:
    """Return the innermost line of a file in the stack of a frame; 0 if there is none."""
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno
