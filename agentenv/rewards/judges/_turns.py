"""Turns among those who ask one judge: so many at a time, on each event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentenv.deadlines import waiting
from agentenv.rewards.per_loop import PerLoop


class Turns:
    """Lets at most so many go at a time, on each event loop; who waits loses no time of its own limit."""

    def __init__(self, max_concurrent: int) -> None:
        self._free = PerLoop(lambda: asyncio.Semaphore(max_concurrent))

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A turn, in here."""
        free = self._free.here()
        with waiting():
            await free.acquire()
        try:
            yield
        finally:
            free.release()
