"""The zygotes of one sandbox: started on demand, and replaced when they are old or lost."""

from __future__ import annotations

import asyncio
import logging

from agentenv.sandbox.local.plan import Plan
from agentenv.sandbox.local.zygote_client import Zygote, ZygoteLost

MAX_SERVED = 10_000
"""Programs after which a zygote is replaced, so that small leaks cannot add up."""
_LOG = logging.getLogger(__name__)


class ZygotePool:
    """A fixed number of zygotes with the same plan."""

    def __init__(self, plan: Plan, *, size: int) -> None:
        self.plan = plan
        self._places: list[Zygote | None] = [None] * size
        self._retired: set[Zygote] = set()
        self.closed = False
        self._starting = asyncio.Lock()  # one start at a time
        self._closing: set[asyncio.Task[None]] = set()

    def adopt(self, zygote: Zygote) -> None:
        """Add a running zygote."""
        self._places[0] = zygote

    @property
    def zygotes(self) -> list[Zygote]:
        """The running zygotes."""
        return [zygote for zygote in (*self._places, *self._retired) if zygote and not zygote.lost]

    async def acquire(self) -> Zygote:
        """Return the zygote with the fewest programs; start it if necessary.

        Raises:
            ZygoteLost: no zygote can be started, or the pool is closed.
        """
        if self.closed:
            raise ZygoteLost("sandbox: closed")

        def num_running(place: int) -> int:
            zygote = self._places[place]
            return zygote.in_flight if zygote and not zygote.lost else 0

        def usable(place: int) -> Zygote | None:
            zygote = self._places[place]
            return zygote if zygote and not zygote.lost and zygote.served < MAX_SERVED else None

        place = min(range(len(self._places)), key=num_running)
        if zygote := usable(place):
            return zygote
        async with self._starting:
            if zygote := usable(place):
                return zygote  # replaced by another caller in the meantime
            old = self._places[place]
            new = await Zygote.start(self.plan)
            if self.closed:
                await new.close()
                raise ZygoteLost("sandbox: closed")
            self._places[place] = new
            if old is not None:
                if old.lost:
                    _LOG.warning("%s; started another", old.lost)
                self._retired.add(old)
                task = asyncio.create_task(self._close_when_idle(old))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            return new

    async def _close_when_idle(self, zygote: Zygote) -> None:
        while zygote.in_flight:  # noqa: ASYNC110 -- once in ten thousand programs
            await asyncio.sleep(0.05)
        await zygote.close()
        self._retired.discard(zygote)

    async def close(self) -> None:
        """End all zygotes and their programs."""
        self.closed = True
        for task in list(self._closing):
            task.cancel()
        zygotes = {zygote for zygote in (*self._places, *self._retired) if zygote}
        await asyncio.gather(*(zygote.close() for zygote in zygotes))
        self._places = [None] * len(self._places)
        self._retired.clear()
