"""NeMo RL's types: the result of a step, its classes of failures, a batch's metrics, and masked rows.

Source: nemo_rl/environments/interfaces.py, nemo_rl/experience/failures.py and rollouts.py, 0.6.0 of 2026-08-22
(7ea279a). Its classes are used if it is installed; torch and NeMo RL are imported inside functions.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from agentenv._util.estimates import Moments
from agentenv.core.types import Message
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.interop.nemo_rl.text import prompt_of

ON_FAILURE = ("raise", "mask")
"""Policies for failed rows; see `environments`."""


class EnvironmentReturn(NamedTuple):
    """The result of a step, shaped like NeMo RL's class, for use without NeMo RL. B rows in order."""

    observations: list[dict[str, str]]
    """[B] with role and content."""
    metadata: list[Any]
    """[B] None for rows that ended."""
    next_stop_strings: list[list[str] | None]
    """[B] None keeps the current ones (in rollouts of whole batches: ends them); an empty list ends them in both."""
    rewards: Any
    """float32[B], or a dict of such tensors."""
    terminateds: Any
    """bool[B]"""
    answers: list[str | None] | None
    """[B]"""


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
    """Return the rows as one EnvironmentReturn, NeMo RL's if it is installed; with `parts` the rewards are a dict."""
    import torch

    def column(values: Sequence[float]) -> Any:
        return torch.tensor(values, dtype=torch.float32)

    names = list(rows[0].parts) if rows else []
    parts = {f"reward/{name}": column([row.parts[name] for row in rows]) for name in names}
    try:
        return_class = import_module("nemo_rl.environments.interfaces").EnvironmentReturn
    except ModuleNotFoundError:
        return_class = EnvironmentReturn
    return return_class(
        observations=[{"role": "environment", "content": row.observation} for row in rows],
        metadata=[row.metadata for row in rows],
        next_stop_strings=[row.stop for row in rows],
        rewards=parts or column([row.reward for row in rows]),
        terminateds=torch.tensor([row.terminated for row in rows], dtype=torch.bool),
        answers=[row.answer for row in rows],
    )


def batch_failure(errors: Mapping[int, BaseException], num_rows: int) -> AgentEnvError:
    """Return one error for a batch with failed rows; it is infrastructure's if all of them are."""
    shown = "; ".join(f"row {index}: {type(error).__name__}: {error}" for index, error in list(errors.items())[:3])
    infra = all(isinstance(error, InfraError | ConnectionError | TimeoutError) for error in errors.values())
    kind = EnvironmentUnavailable if infra else RowsFailed
    return kind(
        f"step: expected a reward for each of {num_rows} rows, got {len(errors)} failures ({shown}). "
        f"{'Roll them out again.' if infra else 'Fix the data or the environment.'}"
    )


def options_of(cls: type[Any], config: Mapping[str, Any], unused: Sequence[str] = ()) -> Any:
    """Return the dataclass of options for a mapping of NeMo RL's configuration; keys in `unused` are ignored.

    Raises:
        ConfigError: a key is unknown.
    """
    fields = list(cls.__dataclass_fields__)
    wrong = [key for key in config if key not in fields and key not in unused]
    if wrong:
        raise ConfigError(f"env: expected the keys {', '.join(fields)}, got {wrong[0]!r}. Remove it.")
    return cls(**{key: value for key, value in config.items() if key in fields})


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
        raise DataError(f"step: expected a log that ends with an assistant's text, got {dict(last)!r:.200}. Fix it.")
    return str(last["content"])


# --- a whole batch ----------------------------------------------------------------------------------------------------


def batch_rewards(batch: Mapping[str, Any]) -> list[float]:
    """Return a batch's rewards from `rewards`, or `total_reward` as in rollouts; NaN if a row failed."""
    column = batch.get("rewards")
    column = batch.get("total_reward") if column is None else column
    values = [] if column is None else column.tolist() if hasattr(column, "tolist") else list(column)
    return [float(value) for value in values]


class RewardFigures(Moments):
    """The figures of rewards, one at a time, by NeMo RL's names."""

    __slots__ = ("high", "low")

    def __init__(self, rewards: Iterable[float] = ()) -> None:
        self.low, self.high = math.inf, -math.inf
        super().__init__(rewards)

    def add(self, value: float, times: int = 1) -> None:
        """Count a finite reward."""
        super().add(value, times)
        self.low, self.high = min(self.low, value), max(self.high, value)

    def metrics(self) -> dict[str, float]:
        """Return mean, std, min and max; nothing before the first reward.

        std is the sample standard deviation, like torch's, and 0.0 for one reward.
        """
        if self.mean is None:
            return {}
        std = math.sqrt(self.variance) if self.num > 1 else 0.0
        return {"mean_reward": self.mean, "std_reward": std, "min_reward": self.low, "max_reward": self.high}


def batch_metrics(batch: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return a NeMo RL batch's `PREFIX/num_samples`, `num_no_reward` and the figures of the finite rewards."""
    rewards, logs = batch_rewards(batch), batch.get("message_log")
    known = RewardFigures(reward for reward in rewards if math.isfinite(reward))
    num_samples = len(rewards if logs is None else logs)
    figures = {"num_samples": num_samples, "num_no_reward": len(rewards) - known.num, **known.metrics()}
    return {f"{prefix}/{name}": float(value) for name, value in figures.items()}


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
