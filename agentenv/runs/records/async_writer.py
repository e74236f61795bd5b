"""Outbox: passes a run's records from the event loop to its RunWriter, in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from agentenv.core.trajectory import Trajectory
from agentenv.runs.metrics import Summary
from agentenv.runs.records.directory import RunWriter


class Outbox:
    """An async context manager around a RunWriter, which it closes.

    Example::

        async with Outbox(RunWriter.open(out, config)) as outbox:
            summary = await outbox.append(trajectory)
            await outbox.settle()
            await outbox.write_metrics(metrics)
    """

    def __init__(self, writer: RunWriter) -> None:
        self.writer = writer
        self._writing: set[asyncio.Future[Any]] = set()
        self._thread = ThreadPoolExecutor(1, "RunWriter")
        self._thread.submit(int)  # starts the thread: when the first episode ends, the system may have none left

    async def append(self, trajectory: Trajectory) -> Summary:
        """Store a finished episode; see `append_all`."""
        return (await self.append_all([trajectory]))[0]

    async def append_all(self, trajectories: Sequence[Trajectory]) -> list[Summary]:
        """Store finished episodes; when this returns, they are in the file.

        If this call is cancelled, the episodes are written nevertheless: `settle` waits for them.

        Raises:
            RunStopped, DataError, ValueError: as `RunWriter.append_all`.
        """
        summaries: list[Summary] = await self._in_thread(self.writer.append_all, trajectories)
        return summaries

    async def settle(self) -> None:
        """Wait until all episodes are written; `writer.tally` does not change afterwards."""
        while self._writing:
            await asyncio.wait(self._writing)

    async def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Replace `metrics.json`.

        Raises:
            RunStopped: the disk is full or fails.
        """
        await self._in_thread(self.writer.write_metrics, metrics)

    async def close(self) -> None:
        """Flush everything to the disk and close the writer.

        Raises:
            RunStopped: the disk fails.
        """
        await self.settle()
        await self._in_thread(self.writer.close)
        self._thread.shutdown()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        self._writing.add(work)
        work.add_done_callback(self._written)
        return await asyncio.shield(work)

    def _written(self, work: asyncio.Future[Any]) -> None:
        self._writing.discard(work)
        if not work.cancelled():
            work.exception()  # retrieved, since asyncio warns of an exception that a cancelled caller does not retrieve

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
