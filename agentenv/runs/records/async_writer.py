"""Outbox: passes a run's records from the event loop to its RunWriter, and ends even if the disk hangs.

A write that never returns keeps its daemon thread and the writer's lock. So that the run can still end, each write has
`HUNG_AFTER_S` at the end, and the error names the records of a write that takes longer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Self

from agentenv._util.calls import call
from agentenv.core.trajectory import Trajectory
from agentenv.errors import AgentEnvError, InfraError, RunStopped
from agentenv.runs.metrics import Summary
from agentenv.runs.records.directory import METRICS, RunWriter

HUNG_AFTER_S = 30.0
"""At the end of a run, longest wait for a write to the disk."""


_Waiting = tuple[Sequence[Trajectory], asyncio.Future[list[Summary]]]
"""Episodes to write, and the future of their summaries."""


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
        self._writing: dict[asyncio.Future[list[Summary]], list[str]] = {}
        self._waiting: list[_Waiting] = []
        self._thread: asyncio.Task[None] | None = None
        self._is_hung = False

    async def append(self, trajectory: Trajectory) -> Summary:
        """Store a finished episode; see `append_all`."""
        return (await self.append_all([trajectory]))[0]

    async def append_all(self, trajectories: Sequence[Trajectory]) -> list[Summary]:
        """Store finished episodes; when this returns, they are in the file.

        If this call is cancelled, the episodes are written nevertheless: `settle` waits for them.

        Raises:
            RunStopped, DataError, ValueError: as `RunWriter.append_all`.
        """
        written = asyncio.get_running_loop().create_future()
        self._writing[written] = [trajectory.episode_id for trajectory in trajectories]
        written.add_done_callback(self._written)
        self._waiting.append((trajectories, written))
        if self._thread is None or self._thread.done():
            self._thread = asyncio.ensure_future(self._write_waiting())
        return await asyncio.shield(written)

    async def _write_waiting(self) -> None:
        """Write what waits, and what comes meanwhile: a thread for each write would cost more than the write."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            loop = asyncio.get_running_loop()
            work = _in_thread(self._append_each, batch, loop)
            failure = (await asyncio.gather(work, return_exceptions=True))[0]
            if failure is not None:
                for _, written in batch:
                    _settle(written, failure)

    def _append_each(self, batch: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        for trajectories, written in batch:
            outcome: list[Summary] | Exception
            try:
                outcome = self.writer.append_all(trajectories)
            except (AgentEnvError, ValueError) as error:  # of these episodes: the next ones may be written
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, written, outcome)

    def _written(self, work: asyncio.Future[list[Summary]]) -> None:
        del self._writing[work]
        if not work.cancelled():
            work.exception()  # retrieved, since asyncio warns of an exception that a cancelled caller does not retrieve

    async def settle(self) -> None:
        """Wait until all episodes are written; `writer.tally` does not change afterwards.

        Raises:
            RunStopped: the disk hangs; the message names the episodes that may not be stored.
        """
        while self._writing:
            done, _ = await asyncio.wait(self._writing, timeout=HUNG_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                ids = list(chain.from_iterable(self._writing.values()))
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
        """Flush everything to the disk and close the writer; do nothing if the disk hung before.

        Raises:
            RunStopped: the disk fails or hangs.
        """
        if not self._is_hung:
            await self.settle()
            await self._bounded("records of the last second", self.writer.close)

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
            f"not stored: {what}. The {len(self.writer.tally)} earlier episodes are kept. Check the disk, then "
            "continue with --resume."
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _settle(written: asyncio.Future[list[Summary]], outcome: list[Summary] | BaseException) -> None:
    if written.done():
        return
    if isinstance(outcome, BaseException):
        written.set_exception(outcome)
    else:
        written.set_result(outcome)


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return await call(function, *args)
    except InfraError:  # no thread is available: block the event loop rather than lose an episode
        return function(*args)
