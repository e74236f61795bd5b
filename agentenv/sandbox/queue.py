"""Who runs next: as many at a time as there are slots, in turn between tenants, and not too many waiting."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

from agentenv.sandbox.types import SandboxBusy


class FairQueue:
    """Slots that are given out in turn between those who ask (round robin), first come first served within each.

    Used from one event loop.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_waiting: int,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`waiting` is entered for as long as somebody waits, in their context: time that is not their own."""
        self.num_slots = num_slots
        self._around = waiting
        self.max_waiting = max_waiting
        self._free = num_slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return sum(len(line) for line in self._waiting.values())

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot; give it back by `release`.

        Raises:
            SandboxBusy: `max_waiting` wait already.
        """
        if self._free and not self._waiting:
            self._free -= 1
            return
        if self.num_waiting >= self.max_waiting:
            raise SandboxBusy(
                f"sandbox queue: expected fewer than {self.max_waiting} waiting, got {self.num_waiting}. "
                "Run fewer episodes at a time, or raise max_waiting"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            with self._around():
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it was ours already
            else:
                self._leave(tenant, turn)
            raise

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """A slot, for as long as the block runs."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Give a slot back: the next tenant's first gets it."""
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[tenant] = line  # to the end: the others come first
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant, deque())
        if turn in line:
            line.remove(turn)
        if not line:
            self._waiting.pop(tenant, None)
