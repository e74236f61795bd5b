"""The base of our environments for NeMo RL: their own event loop, concurrent rows, metrics; and NeMo RL's types.

Source: nemo_rl/environments/interfaces.py, nemo_rl/experience/failures.py and rollouts.py, 0.6.0 of 2026-08-22
(7ea279a). Its classes are used if it is installed; torch and NeMo RL are imported inside functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import statistics
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from agentenv._util.loop_thread import LoopThread
from agentenv.core.types import Message
from agentenv.errors import AgentEnvError, ContractError, DataError, InfraError
from agentenv.interop.nemo_rl.text import prompt_of

_CLOSE_S = 4.0
"""Time limit of each part of a shutdown; NeMo RL waits ten seconds for the whole."""
ON_FAILURE = ("raise", "mask")
"""Policies for failed rows; see `environments`."""


class EnvironmentUnavailable(InfraError, ConnectionError):
    """Infrastructure failed, or the actor has lost an episode: NeMo RL rolls the prompt out again.

    NeMo RL recognizes failures of infrastructure by built-in classes, including ConnectionError.
    """


class RowsFailed(AgentEnvError, RuntimeError):
    """Rows of a batch that would fail again: NeMo RL treats it as a fault of the data."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row's part of a step's result."""

    observation: str
    reward: float
    terminated: bool
    metadata: Mapping[str, Any] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward in named parts that sum to it; all rows have the same names."""
    stop: list[str] | None = None
    answer: str | None = None


def returned(rows: Sequence[StepRow]) -> Any:
    """Return B rows as NeMo RL's EnvironmentReturn, or as an object with its fields if NeMo RL is not installed.

    Fields: `observations` [B] with role and content; `metadata` [B], None for rows that ended; `next_stop_strings` [B],
    where None keeps the current ones (in rollouts of whole batches: ends them) and an empty list ends them in both;
    `rewards` float32[B], or with `parts` a dict of such tensors; `terminateds` bool[B]; `answers` [B].
    """
    import torch

    def column(values: Sequence[float]) -> Any:
        return torch.tensor(values, dtype=torch.float32)

    names = list(rows[0].parts) if rows else []
    parts = {f"reward/{name}": column([row.parts[name] for row in rows]) for name in names}
    return_class: Any = SimpleNamespace
    with contextlib.suppress(ModuleNotFoundError):
        return_class = import_module("nemo_rl.environments.interfaces").EnvironmentReturn
    return return_class(
        observations=[{"role": "environment", "content": row.observation} for row in rows],
        metadata=[row.metadata for row in rows],
        next_stop_strings=[row.stop for row in rows],
        rewards=parts or column([row.reward for row in rows]),
        terminateds=torch.tensor([row.terminated for row in rows], dtype=torch.bool),
        answers=[row.answer for row in rows],
    )


def bare(log: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a log's messages with role and content only; an environment's message becomes a user's."""
    roles = {"environment": "user"}
    return [{"role": roles.get(str(m.get("role")), m.get("role")), "content": m.get("content")} for m in log]


def last_action(log: Sequence[Mapping[str, Any]]) -> str:
    """Return the policy's last action.

    Raises:
        DataError: the log does not end with an assistant's text.
    """
    last: Mapping[str, Any] = log[-1] if len(log) else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise DataError(f"step: expected a log that ends with an assistant's text, got {dict(last)!r:.200}.")
    return str(last["content"])


# --- the environment -------------------------------------------------------------------------------------------------


class Environment:
    """The base of both environments: steps rows concurrently on one event loop and returns results in order."""

    def __init__(self, name: str, on_failure: str, parts: Sequence[str] = ()) -> None:
        self._name = name
        self._parts = parts
        """Names of the parts of the reward."""
        self._on_failure = on_failure
        self._num_stepping = 0
        self._calls: set[asyncio.Task[Any]] = set()
        """The calls of `step` that run on the loop."""
        self._lock = threading.Lock()  # guards _num_stepping and _thread
        self._thread: LoopThread | None = LoopThread(f"agentenv-{name}")

    def step(
        self, message_log_batch: Sequence[Any], metadata: Sequence[Any], return_extracted_answer: bool = False
    ) -> Any:
        """Step all rows and return NeMo RL's EnvironmentReturn; see `returned`.

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

    async def _outcomes(self, logs: list[list[Any]], metadata: list[dict[str, Any]]) -> list[StepRow]:
        call: Any = asyncio.current_task()
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        rows = await asyncio.gather(*map(self._row, logs, metadata), return_exceptions=True)
        errors = {index: row for index, row in enumerate(rows) if isinstance(row, BaseException)}
        if errors and self._on_failure == "raise":
            await self._end_unfinished([row for row in rows if isinstance(row, StepRow)])
            shown = "; ".join(f"row {at}: {type(error).__name__}: {error}" for at, error in list(errors.items())[:3])
            is_infra = all(isinstance(error, InfraError | ConnectionError | TimeoutError) for error in errors.values())
            raise (EnvironmentUnavailable if is_infra else RowsFailed)(
                f"step: expected a reward for each of {len(rows)} rows, got {len(errors)} failures ({shown}). "
                f"{'Roll them out again.' if is_infra else 'Fix the data or the environment.'}"
            ) from next(iter(errors.values()))
        nan = float("nan")
        parts = dict.fromkeys((*self._parts, "rest"), nan) if self._parts else {}
        return [
            StepRow(f"Environment: failed: {type(row).__name__}", nan, terminated=True, parts=parts)
            if isinstance(row, BaseException)
            else row
            for row in rows
        ]

    async def _row(self, log: Sequence[Any], metadata: Mapping[str, Any]) -> StepRow:
        raise NotImplementedError

    async def _end_unfinished(self, rows: Sequence[StepRow]) -> None:
        """Release rows to which NeMo RL will not return."""

    async def _close(self) -> None:
        """Free all resources; runs on the loop."""

    def metrics(self) -> dict[str, float]:
        """Return counts since the start, under the environment's name; NeMo RL asks no environment for its metrics."""
        raise NotImplementedError

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the batch, and the statistics of its rewards with the counts since the start.

        Rewards are read from `rewards` or, as in rollouts, `total_reward`. Under `on_failure="mask"` the batch is a
        copy in which failed rows are `masked`. NeMo RL never calls this method itself.
        """
        rewards, logs = batch_rewards(batch), batch.get("message_log")
        known = [reward for reward in rewards if math.isfinite(reward)]
        num_samples = len(rewards if logs is None else logs)
        figures: dict[str, float] = {"num_samples": num_samples, "num_no_reward": len(rewards) - len(known)}
        if known:
            std = statistics.stdev(known) if len(known) > 1 else 0.0  # of a sample, like torch's
            figures |= {"mean_reward": statistics.fmean(known), "std_reward": std}
            figures |= {"min_reward": min(known), "max_reward": max(known)}
        named = {f"{self._name}/{name}": float(value) for name, value in figures.items()}
        return (masked(batch) if self._on_failure == "mask" else batch), self.metrics() | named

    def shutdown(self) -> None:
        """Cancel running steps, close everything and stop the event loop; a second call does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return

        async def cancel_calls() -> None:
            for call in self._calls:  # only these: a second cancellation would interrupt the close of their episodes
                call.cancel()
            if self._calls:
                await asyncio.wait(self._calls, timeout=_CLOSE_S / 4)

        try:
            end = time.monotonic() + _CLOSE_S
            while self._num_stepping and time.monotonic() < end:  # a step may only be about to start
                thread.run(cancel_calls())
                time.sleep(0.01)
            with contextlib.suppress(TimeoutError):
                thread.run(asyncio.wait_for(self._close(), _CLOSE_S))
        finally:
            thread.close(_CLOSE_S)


# --- a whole batch ----------------------------------------------------------------------------------------------------


def batch_rewards(batch: Mapping[str, Any]) -> list[float]:
    """Return a batch's rewards from `rewards`, or `total_reward` as in rollouts; NaN if a row failed."""
    column = batch.get("rewards")
    column = batch.get("total_reward") if column is None else column
    values = [] if column is None else column.tolist() if hasattr(column, "tolist") else list(column)
    return [float(value) for value in values]


def masked(batch: Any, groups: Sequence[Hashable] | None = None) -> Any:
    """Return a copy of a batch in which rows of reward NaN change neither the loss nor their siblings' baseline.

    Their `loss_multiplier` is 0 and their `mask_sample` true. NeMo RL's baselines count every row of a prompt, so a
    number must replace the reward, and each of its parts: the mean of the siblings that have one, which keeps the mean
    as it is; 0.0 if none has. `groups` defines siblings. The default is the rows of one prompt in `message_log`, as in
    NeMo RL's baselines, or of one `idx` without logs (rollouts of single samples number the rows there).

    Call it between the rollout and the advantages: NeMo RL itself does not.

    Raises:
        DataError: rows failed, and nothing defines the siblings.
    """
    import torch

    rewards = batch_rewards(batch)
    failed = [not math.isfinite(reward) for reward in rewards]
    if not any(failed):
        return batch
    logs = batch.get("message_log")
    if groups is not None:
        keys = list(groups)
    elif logs is not None:
        keys = [tuple((m.get("role"), str(m.get("content"))) for m in prompt_of(log, log) or log) for log in logs]
    else:
        ids: Any = batch.get("idx")
        keys = list(ids.tolist() if hasattr(ids, "tolist") else ids or ())
    if len(keys) != len(rewards):
        raise DataError(f"masked: expected a group for each of {len(rewards)} rows, got {len(keys)}. Pass `groups`.")
    result, mask = copy.copy(batch), torch.tensor(failed, dtype=torch.bool)
    weights = batch.get("loss_multiplier")
    weights = torch.ones(len(rewards)) if weights is None else torch.as_tensor(weights, dtype=torch.float32).clone()
    weights[mask] = 0.0
    result["loss_multiplier"], result["mask_sample"] = weights, mask
    result["rewards" if batch.get("rewards") is not None else "total_reward"] = torch.tensor(_filled(rewards, keys))
    for name in [name for name in batch if str(name).startswith("reward/")]:
        result[name] = torch.tensor(_filled([float(value) for value in batch[name]], keys))
    return result


def _filled(values: Sequence[float], keys: Sequence[Hashable]) -> list[float]:
    """Return the values; the siblings' mean replaces those that are not finite."""
    known: dict[Hashable, list[float]] = {key: [] for key in keys}
    for key, value in zip(keys, values, strict=True):
        known[key] += [value] if math.isfinite(value) else []
    means = {key: statistics.fmean(each) if each else 0.0 for key, each in known.items()}
    return [value if math.isfinite(value) else means[key] for key, value in zip(keys, values, strict=True)]
