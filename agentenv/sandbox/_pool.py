"""The zygotes of one sandbox: started when needed, shared out, replaced when old or lost."""

from __future__ import annotations

import asyncio
import logging

from agentenv.sandbox._client import Zygote, ZygoteLost
from agentenv.sandbox._plan import Plan

MAX_SERVED = 10_000
"""Programs until a zygote is replaced: what little it might collect ends with it."""
_LOG = logging.getLogger(__name__)


class Pool:
    """Some zygotes, all of one plan."""

    def __init__(self, plan: Plan, *, size: int) -> None:
        self.plan = plan
        self._places: list[Zygote | None] = [None] * size
        self._retired: set[Zygote] = set()
        self.closed = False
        self._starting = asyncio.Lock()  # one start at a time
        self._closing: set[asyncio.Task[None]] = set()

    def adopt(self, zygote: Zygote) -> None:
        """Take in one that runs already."""
        self._places[0] = zygote

    @property
    def zygotes(self) -> list[Zygote]:
        """Those that run."""
        return [zygote for zygote in (*self._places, *self._retired) if zygote and not zygote.lost]

    async def acquire(self) -> Zygote:
        """The least busy one, started if it is not.

        Raises:
            ZygoteLost: none can be started, or it is closed.
        """
        if self.closed:
            raise ZygoteLost("sandbox: closed")
        place = min(range(len(self._places)), key=self._load)
        zygote = self._places[place]
        if zygote is None or zygote.lost or zygote.served >= MAX_SERVED:
            async with self._starting:
                zygote = await self._replace(place)
        return zygote

    def _load(self, place: int) -> int:
        zygote = self._places[place]
        return zygote.in_flight if zygote and not zygote.lost else 0

    async def _replace(self, place: int) -> Zygote:
        old = self._places[place]
        if old and not old.lost and old.served < MAX_SERVED:
            return old  # another has, while we waited
        new = await Zygote.start(self.plan)
        if self.closed:
            await new.close()
            raise ZygoteLost("sandbox: closed")
        self._places[place] = new
        if old is not None:
            if old.lost:
                _LOG.warning("%s; started another", old.lost)
            self._retire(old)
        return new

    def _retire(self, zygote: Zygote) -> None:
        """Close it once what it runs has ended."""
        self._retired.add(zygote)
        task = asyncio.create_task(self._drain(zygote))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _drain(self, zygote: Zygote) -> None:
        while zygote.in_flight:  # noqa: ASYNC110 -- once in ten thousand programs
            await asyncio.sleep(0.05)
        await zygote.close()
        self._retired.discard(zygote)

    async def close(self) -> None:
        """End all zygotes and what they run, for good."""
        self.closed = True
        for task in list(self._closing):
            task.cancel()
        zygotes = {zygote for zygote in (*self._places, *self._retired) if zygote}
        await asyncio.gather(*(zygote.close() for zygote in zygotes))
        self._places = [None] * len(self._places)
        self._retired.clear()
