"""Outbox: hands a run's records from the event loop to its RunWriter, and ends even where the disk hangs.

A write that never returns keeps its thread, a daemon, and the writer's lock with it. Neither may keep the run from
ending: at the end each write gets `HUNG_AFTER_S`, and what it was about is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Self

from agentenv.agent import call
from agentenv.errors import InfraError, RunStopped
from agentenv.metrics import Summary
from agentenv.record import METRICS, RunWriter
from agentenv.trajectory import Trajectory

HUNG_AFTER_S = 30.0
"""At the end of a run, a disk that took nothing for so long is given up."""


class Outbox:
    """Around a RunWriter, which it closes; an async context manager.

    Example::

        async with Outbox(RunWriter.open(out, config)) as outbox:
            summary = await outbox.append(trajectory)
            await outbox.settle()
            await outbox.write_metrics(metrics)
    """

    def __init__(self, writer: RunWriter) -> None:
        self.writer = writer
        self._writing: dict[asyncio.Future[Summary], str] = {}
        self._is_hung = False

    async def append(self, trajectory: Trajectory) -> Summary:
        """Store a finished episode; what is counted after this is in the file.

        Cancelling this does not take the episode back: `settle` waits for it.

        Raises:
            RunStopped, DataError, ValueError: as `RunWriter.append`.
        """
        work = asyncio.ensure_future(_in_thread(self.writer.append, trajectory))
        self._writing[work] = trajectory.episode_id
        work.add_done_callback(self._written)
        return await asyncio.shield(work)

    def _written(self, work: asyncio.Future[Summary]) -> None:
        del self._writing[work]
        if not work.cancelled():
            work.exception()  # nobody asks where the waiter was cancelled, which asyncio would complain about

    async def settle(self) -> None:
        """Wait until no episode is being written; `writer.tally` stands still afterwards.

        Raises:
            RunStopped: the disk hangs; with the episodes that may not be stored.
        """
        while self._writing:
            done, _ = await asyncio.wait(self._writing, timeout=HUNG_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                ids = list(self._writing.values())
                named = f"{', '.join(ids[:8])}{', …' if len(ids) > 8 else ''}"
                raise self._hung(f"{len(ids)} finished episodes ({named}) and {METRICS}")
            await asyncio.sleep(0)  # their callbacks

    async def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Replace `metrics.json`.

        Raises:
            RunStopped: the disk is full, fails or hangs.
        """
        await self._bounded(METRICS, self.writer.write_metrics, metrics)

    async def close(self) -> None:
        """Bring everything to the disk and close the writer; a disk that was found to hang is left alone.

        Raises:
            RunStopped: the disk fails or hangs.
        """
        if not self._is_hung:
            await self._bounded("what the disk still had to take of the last second", self.writer.close)

    async def _bounded(self, what: str, function: Callable[..., None], *args: Any) -> None:
        work = asyncio.ensure_future(_in_thread(function, *args))
        await asyncio.wait({work}, timeout=HUNG_AFTER_S)
        if not work.done():
            work.cancel()
            raise self._hung(what)
        work.result()

    def _hung(self, what: str) -> RunStopped:
        self._is_hung = True
        return RunStopped(
            f"{self.writer.path}: expected the disk to take a write within {HUNG_AFTER_S:g} s, got no answer. Perhaps "
            f"not stored: {what}. The {len(self.writer.tally)} episodes before are kept: look at the disk, then go "
            "on with --resume."
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return await call(function, *args)
    except InfraError:  # no thread can be had: better the event loop waits for the disk than an episode is lost
        return function(*args)
