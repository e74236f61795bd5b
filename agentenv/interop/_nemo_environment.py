"""What our environments of NeMo RL have in common: an event loop of their own, rows side by side, failures, figures."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent import futures
from typing import Any

from agentenv.errors import ContractError
from agentenv.interop._nemo_types import (
    EnvironmentUnavailable,
    Row,
    batch_failure,
    batch_metrics,
    checked_batch,
    masked,
    returned,
)
from agentenv.rewards.loop_thread import LoopThread

logger = logging.getLogger(__name__)

_METRICS_EVERY_S = 10.0
_CLOSE_S = 4.0
"""Longest that each part of a shutdown takes; NeMo RL waits ten seconds for all."""


class OwnLoop(LoopThread):
    """An event loop in a thread, which can be ended."""

    def close(self) -> None:
        """Stop the loop; the thread ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class Environment:
    """What both environments are: rows stepped together on one event loop, results in order, failures told apart."""

    def __init__(self, name: str, on_failure: str, metrics_path: str | None) -> None:
        self._name, self._on_failure, self._metrics_path = name, on_failure, metrics_path
        self._written, self._writing = -math.inf, threading.Lock()  # of steps of many threads one writes
        self._num_stepping, self._lock = 0, threading.Lock()  # guards that, and _thread
        self._thread: OwnLoop | None = OwnLoop(f"agentenv-{name}")

    def step(
        self, message_log_batch: Sequence[Any], metadata: Sequence[Any], return_extracted_answer: bool = False
    ) -> Any:
        """Step all rows at once; an EnvironmentReturn, of NeMo RL's own class where that is installed.

        Args:
            message_log_batch: [B] message logs; of each message role and content are read.
            metadata: [B] `extra_env_info` of the rows, never changed; None is an empty one.
            return_extracted_answer: what NeMo RL's evaluation passes; `answers` are given in any case.

        Raises:
            EnvironmentUnavailable, RowsFailed: rows failed, under `on_failure="raise"`; after all others were stepped.
            DataError: not one metadata for each row.
            ContractError: the environment was shut down.
        """
        checked_batch(message_log_batch, metadata)
        logs, given = [list(log) for log in message_log_batch], [dict(each or {}) for each in metadata]
        with self._lock:
            thread = self._thread
            if thread is None:
                raise ContractError(f"{self._name}: expected a running environment, got one after shutdown. Make one.")
            self._num_stepping += 1
        try:
            return returned(thread.call(self._outcomes(logs, given)))
        except futures.CancelledError as error:
            raise EnvironmentUnavailable(f"{self._name}: expected a step, got a shutdown. Make another.") from error
        finally:
            with self._lock:
                self._num_stepping -= 1
            self._emit(every_s=_METRICS_EVERY_S)

    async def _outcomes(self, logs: list[list[Any]], metadata: list[dict[str, Any]]) -> list[Row]:
        rows = await asyncio.gather(*map(self._row, logs, metadata), return_exceptions=True)
        errors = {index: row for index, row in enumerate(rows) if isinstance(row, BaseException)}
        if errors and self._on_failure == "raise":
            await self._give_up([row for row in rows if isinstance(row, Row)])
            error = batch_failure(errors, len(rows))
            raise error from next(iter(errors.values()))
        return [self._failed(row) if isinstance(row, BaseException) else row for row in rows]

    async def _row(self, log: Sequence[Any], metadata: Mapping[str, Any]) -> Row:
        raise NotImplementedError

    def _failed(self, error: BaseException) -> Row:
        return Row(f"Environment: failed: {type(error).__name__}", float("nan"), terminated=True)

    async def _give_up(self, rows: Sequence[Row]) -> None:
        """Let go of rows that NeMo RL will not come back to."""

    async def _close(self) -> None:
        """Free what is held, on the loop."""

    def metrics(self) -> dict[str, float]:
        """Counts since the start, under the environment's name."""
        raise NotImplementedError

    def _emit(self, *, every_s: float) -> None:
        """Append the figures to `metrics_path`, where the last line is as old."""
        if self._metrics_path is None:
            return
        with self._writing:
            if time.monotonic() - self._written < every_s:
                return
            self._written = time.monotonic()
            line = json.dumps({"created": time.time(), **self.metrics()})
            try:
                with open(self._metrics_path, "a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            except OSError as error:  # figures are not worth a training
                logger.warning("metrics_path: expected to write to %s, got %s", self._metrics_path, error)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """The batch, and the statistics of its rewards with the counts since the start.

        Rewards are read under `rewards` or, as rollouts have them, `total_reward`. Under `on_failure="mask"` the batch
        is a copy in which failed rows are `masked`. NeMo RL never calls this itself.
        """
        figures = self.metrics() | batch_metrics(batch, self._name)
        return (masked(batch) if self._on_failure == "mask" else batch), figures

    def shutdown(self) -> None:
        """Give up the steps that run, close all that is open and end the event loop; again it does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            end = time.monotonic() + _CLOSE_S
            while self._num_stepping and time.monotonic() < end:  # one may only be about to begin
                thread.call(_cancel_others())
                time.sleep(0.01)
            thread.call(_within(self._close()))
        finally:
            thread.close()
            self._emit(every_s=0.0)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_CLOSE_S / 4)


async def _within(work: Coroutine[Any, Any, None]) -> None:
    done, _ = await asyncio.wait([asyncio.ensure_future(work)], timeout=_CLOSE_S)
    for task in done:
        task.result()
