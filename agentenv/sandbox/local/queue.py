"""A queue for run slots: round robin between callers, with a limit on the number of waiters."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentenv._util.calls import waiting
from agentenv.sandbox.types import SandboxBusy


class FairQueue:
    """A queue for slots: round robin between callers that have names, first come first served within a name.

    For use from one event loop.
    """

    def __init__(self, num_slots: int, *, max_waiting: int) -> None:
        """Create a queue.

        Args:
            num_slots: number of slots.
            max_waiting: number of waiters from which `acquire` raises SandboxBusy.
        """
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        self._free = num_slots
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()
        """The waiters of each name, each with its number of slots."""

    @property
    def num_waiting(self) -> int:
        """The number of waiters."""
        return sum(len(line) for line in self._waiting.values())

    async def acquire(self, name: str = "", *, alone: bool = False) -> None:
        """Wait for a slot, or for all of them to be `alone`; the caller must return them with `release`.

        Raises:
            SandboxBusy: `max_waiting` callers are waiting.
        """
        num = self.num_slots if alone else 1
        if self._free >= num and not self._waiting:
            self._free -= num
            return
        if self.num_waiting >= self.max_waiting:
            raise SandboxBusy(
                f"sandbox queue: expected fewer than {self.max_waiting} waiting, got {self.num_waiting}. "
                "Run fewer concurrent episodes, or raise max_waiting"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append((turn, num))
        try:
            with waiting():  # which does not count toward the time limit of the running method
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(alone=alone)  # the slots were already assigned to this caller
            else:
                line = self._waiting.get(name, deque())
                if (turn, num) in line:
                    line.remove((turn, num))
                if not line:
                    self._waiting.pop(name, None)
                self._admit()  # others, if it waited for all slots
            raise

    @asynccontextmanager
    async def slot(self, name: str = "", *, alone: bool = False) -> AsyncIterator[None]:
        """Hold a slot, or all of them, for the duration of the block."""
        await self.acquire(name, alone=alone)
        try:
            yield
        finally:
            self.release(alone=alone)

    def release(self, *, alone: bool = False) -> None:
        """Return a slot, or all of them; the first waiter of the next name gets it."""
        self._free += self.num_slots if alone else 1
        self._admit()

    def _admit(self) -> None:
        """Assign free slots, in turn; a waiter that is to be alone waits for all, and no other overtakes it."""
        while self._waiting:
            name, line = next(iter(self._waiting.items()))
            turn, num = line[0]
            if not turn.done():
                if num > self._free:
                    return
                self._free -= num
                turn.set_result(None)
            line.popleft()
            self._waiting.move_to_end(name)
            if not line:
                del self._waiting[name]
