"""The base of our environments for NeMo RL: their own event loop, concurrent rows, failures, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from agentenv._util.loop_thread import LoopThread
from agentenv.errors import ContractError, DataError
from agentenv.interop.nemo_rl.types import (
    EnvironmentUnavailable,
    StepRow,
    batch_failure,
    batch_metrics,
    masked,
    returned,
)

logger = logging.getLogger(__name__)

_METRICS_EVERY_S = 10.0
_CLOSE_S = 4.0
"""Time limit of each part of a shutdown; NeMo RL waits ten seconds for the whole."""


class Environment:
    """The base of both environments: steps rows concurrently on one event loop and returns results in order."""

    def __init__(self, name: str, on_failure: str, metrics_path: str | None) -> None:
        self._name = name
        self._on_failure = on_failure
        self._metrics_path = metrics_path
        self._written = -math.inf
        self._writing = threading.Lock()  # steps run in many threads: one writes at a time
        self._num_stepping = 0
        self._calls: set[asyncio.Task[Any]] = set()
        """The calls of `step` that run on the loop."""
        self._lock = threading.Lock()  # guards _num_stepping and _thread
        self._thread: LoopThread | None = LoopThread(f"agentenv-{name}")

    def step(
        self, message_log_batch: Sequence[Any], metadata: Sequence[Any], return_extracted_answer: bool = False
    ) -> Any:
        """Step all rows and return an EnvironmentReturn, of NeMo RL's own class if that is installed.

        Args:
            message_log_batch: [B] message logs; only role and content of each message are read.
            metadata: [B] `extra_env_info` of the rows, never changed; None means empty.
            return_extracted_answer: NeMo RL's evaluation passes it; `answers` are always returned.

        Raises:
            EnvironmentUnavailable, RowsFailed: rows failed, under `on_failure="raise"`; raised after all others are
                stepped.
            DataError: the numbers of metadata and rows differ.
            ContractError: the environment was shut down.
        """
        if len(message_log_batch) != len(metadata):
            raise DataError(
                f"step: expected metadata for each of {len(message_log_batch)} rows, got {len(metadata)}. "
                "Pass one for each row."
            )
        logs = [list(log) for log in message_log_batch]
        rows = [dict(each or {}) for each in metadata]
        with self._lock:
            thread = self._thread
            if thread is None:
                raise ContractError(
                    f"{self._name}: expected a running environment, got a closed one. Create a new one."
                )
            self._num_stepping += 1
        try:
            return returned(thread.run(self._outcomes(logs, rows)))
        except futures.CancelledError as error:
            raise EnvironmentUnavailable(f"{self._name}: expected a step, got a shutdown. Create a new one.") from error
        finally:
            with self._lock:
                self._num_stepping -= 1
            self._emit(every_s=_METRICS_EVERY_S)

    async def _outcomes(self, logs: list[list[Any]], metadata: list[dict[str, Any]]) -> list[StepRow]:
        call: Any = asyncio.current_task()
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        rows = await asyncio.gather(*map(self._row, logs, metadata), return_exceptions=True)
        errors = {index: row for index, row in enumerate(rows) if isinstance(row, BaseException)}
        if errors and self._on_failure == "raise":
            await self._end_unfinished([row for row in rows if isinstance(row, StepRow)])
            error = batch_failure(errors, len(rows))
            raise error from next(iter(errors.values()))
        return [self._failed(row) if isinstance(row, BaseException) else row for row in rows]

    async def _row(self, log: Sequence[Any], metadata: Mapping[str, Any]) -> StepRow:
        raise NotImplementedError

    def _failed(self, error: BaseException) -> StepRow:
        return StepRow(f"Environment: failed: {type(error).__name__}", float("nan"), terminated=True)

    async def _end_unfinished(self, rows: Sequence[StepRow]) -> None:
        """Release rows to which NeMo RL will not return."""

    async def _close(self) -> None:
        """Free all resources; runs on the loop."""

    def metrics(self) -> dict[str, float]:
        """Return counts since the start, under the environment's name."""
        raise NotImplementedError

    def _emit(self, *, every_s: float) -> None:
        """Append the metrics to `metrics_path` if the last line is at least `every_s` old."""
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
            except OSError as error:  # metrics are not worth a failed training run
                logger.warning("metrics_path: expected to write to %s, got %s", self._metrics_path, error)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the batch, and the statistics of its rewards with the counts since the start.

        Rewards are read from `rewards` or, as in rollouts, `total_reward`. Under `on_failure="mask"` the batch is a
        copy in which failed rows are `masked`. NeMo RL never calls this method itself.
        """
        figures = self.metrics() | batch_metrics(batch, self._name)
        return (masked(batch) if self._on_failure == "mask" else batch), figures

    async def _cancel_calls(self) -> None:
        """Cancel only the calls themselves: a second cancellation would interrupt the close of their episodes."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_CLOSE_S / 4)

    def shutdown(self) -> None:
        """Cancel running steps, close everything and stop the event loop; a second call does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            end = time.monotonic() + _CLOSE_S
            while self._num_stepping and time.monotonic() < end:  # a step may only be about to start
                thread.run(self._cancel_calls())
                time.sleep(0.01)
            with contextlib.suppress(TimeoutError):
                thread.run(asyncio.wait_for(self._close(), _CLOSE_S))
        finally:
            thread.close(_CLOSE_S)
            self._emit(every_s=0.0)
