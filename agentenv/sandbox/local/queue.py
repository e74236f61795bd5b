"""A queue for run slots: round robin between tenants, with a limit on the number of waiters."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

from agentenv.sandbox.types import SandboxBusy


class FairQueue:
    """A queue for slots: round robin between tenants, first come first served within a tenant.

    For use from one event loop.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_waiting: int,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Create a queue.

        Args:
            num_slots: number of slots.
            max_waiting: number of waiters from which `acquire` raises SandboxBusy.
            waiting: returns a context that is entered while a caller waits, in the caller's context.
        """
        self.num_slots = num_slots
        self._around = waiting
        self.max_waiting = max_waiting
        self._free = num_slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """The number of waiters."""
        return sum(len(line) for line in self._waiting.values())

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot; the caller must return it with `release`.

        Raises:
            SandboxBusy: `max_waiting` callers are waiting.
        """
        if self._free and not self._waiting:
            self._free -= 1
            return
        if self.num_waiting >= self.max_waiting:
            raise SandboxBusy(
                f"sandbox queue: expected fewer than {self.max_waiting} waiting, got {self.num_waiting}. "
                "Run fewer concurrent episodes, or raise max_waiting"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            with self._around():
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was already assigned to this caller
            else:
                line = self._waiting.get(tenant, deque())
                if turn in line:
                    line.remove(turn)
                if not line:
                    self._waiting.pop(tenant, None)
            raise

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot for the duration of the block."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Return a slot; the first waiter of the next tenant gets it."""
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[tenant] = line  # to the end: the other tenants come first
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
