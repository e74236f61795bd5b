"""outside: tells an event loop of virtual time that others work for it. Remote sandboxes take it along."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext


def outside() -> AbstractContextManager[object]:
    """While others work for this loop (threads, processes), in here: a loop of virtual time stands still meanwhile."""
    held = getattr(asyncio.get_running_loop(), "outside", None)
    return nullcontext() if held is None else held()
