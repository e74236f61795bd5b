"""Records which instructions of an environment's own files run, to tell which actions reach code that no other does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

_MAX_EVENTS = 50_000
"""Instructions that are recorded within one block; a long computation continues without a record."""
Instruction = tuple[CodeType, int]
"""A code object, and the offset in it."""


@contextmanager
def recorded_instructions(files: Collection[str]) -> Iterator[set[Instruction]]:
    """Return a set to which the instructions of these files are added that this thread, and new ones, run."""
    seen: set[Instruction] = set()
    num_left = _MAX_EVENTS

    def of_frame(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files or num_left <= 0:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return of_instruction

    def of_instruction(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_left
        if event == "opcode":
            seen.add((frame.f_code, frame.f_lasti))
            num_left -= 1
        return of_instruction if num_left > 0 else None

    before, of_threads = sys.gettrace(), threading.gettrace()
    threading.settrace(of_frame)
    sys.settrace(of_frame)
    try:
        yield seen
    finally:
        sys.settrace(before)
        threading.settrace(of_threads)
