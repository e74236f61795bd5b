"""Waiting for what comes about, for as long as a slow machine may need, and processes that live."""

import asyncio
import time
from pathlib import Path

LONGEST_S = 280.0
"""Less than a test may take."""


async def until(condition, timeout_s=LONGEST_S):
    """Wait on an event loop until something holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def wait_until(condition, timeout_s=LONGEST_S):
    """Wait in a thread until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.005)


def is_alive(pid):
    """Return True if a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
