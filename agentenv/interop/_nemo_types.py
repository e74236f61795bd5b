"""NeMo RL's shapes: what a step gives, the failures that it tells apart, metrics of a batch, and rows to leave out.

Source: nemo_rl/environments/interfaces.py, nemo_rl/experience/failures.py and rollouts.py, 0.6.0 of 2026-08-22
(7ea279a). Its classes are used where it is installed; torch and it are imported inside of functions.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.interop._nemo_text import prompt_of
from agentenv.rewards._arguments import one_of
from agentenv.types import Message

ON_FAILURE = ("raise", "mask")
"""What becomes of rows that failed; see `nemo_rl_env`."""


class EnvironmentReturn(NamedTuple):
    """What a step gives, of NeMo RL's shape, for where it is not installed. B rows, in the order in which they came."""

    observations: list[dict[str, str]]
    """[B] with role and content."""
    metadata: list[Any]
    """[B] None for rows that ended."""
    next_stop_strings: list[list[str] | None]
    """[B] None keeps what is in force, or, in rollouts of whole batches, ends it; an empty list ends it in both."""
    rewards: Any
    """float32[B], or a dict of those."""
    terminateds: Any
    """bool[B]"""
    answers: list[str | None] | None
    """[B]"""


class EnvironmentUnavailable(InfraError, ConnectionError):
    """Infrastructure failed, or the actor has lost an episode: NeMo RL rolls the prompt out again.

    It tells infrastructure's failures from others by built-in classes, ConnectionError among them.
    """


class RowsFailed(AgentEnvError, RuntimeError):
    """Rows of a batch that would fail again: NeMo RL takes it for the data's fault."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row's part of a step."""

    observation: str
    reward: float
    terminated: bool
    metadata: Mapping[str, Any] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward in named parts, which sum to it; of the same names in all rows."""
    stop: list[str] | None = None
    answer: str | None = None


def returned(rows: Sequence[Row]) -> Any:
    """The rows as one EnvironmentReturn, NeMo RL's own where it is installed; with `parts` the rewards are a dict."""
    import torch

    def column(values: Sequence[float]) -> Any:
        """float32[B]."""
        return torch.tensor(values, dtype=torch.float32)

    names = list(rows[0].parts) if rows else []
    parts = {f"reward/{name}": column([row.parts[name] for row in rows]) for name in names}
    return _return_class()(
        observations=[{"role": "environment", "content": row.observation} for row in rows],
        metadata=[row.metadata for row in rows],
        next_stop_strings=[row.stop for row in rows],
        rewards=parts or column([row.reward for row in rows]),
        terminateds=torch.tensor([row.terminated for row in rows], dtype=torch.bool),
        answers=[row.answer for row in rows],
    )


def _return_class() -> Any:
    try:
        return import_module("nemo_rl.environments.interfaces").EnvironmentReturn
    except ModuleNotFoundError:
        return EnvironmentReturn


def batch_failure(errors: Mapping[int, BaseException], num_rows: int) -> AgentEnvError:
    """One error for a batch of which these rows failed; it is infrastructure's where all of them are."""
    shown = "; ".join(f"row {index}: {type(error).__name__}: {error}" for index, error in list(errors.items())[:3])
    infra = all(isinstance(error, InfraError | ConnectionError | TimeoutError) for error in errors.values())
    kind = EnvironmentUnavailable if infra else RowsFailed
    return kind(
        f"step: expected a reward for each of {num_rows} rows, got {len(errors)} failures ({shown}). "
        f"{'Roll them out again.' if infra else 'Mend the data or the environment.'}"
    )


def options_of(cls: type[Any], config: Mapping[str, Any], unused: Sequence[str] = ()) -> Any:
    """The dataclass of options that a mapping of NeMo RL's configuration gives; keys in `unused` are passed over.

    Raises:
        ConfigError: a key is none of its fields.
    """
    fields = list(cls.__dataclass_fields__)
    wrong = [key for key in config if key not in fields and key not in unused]
    if wrong:
        raise ConfigError(f"env: expected the keys {', '.join(fields)}, got {wrong[0]!r}. Leave it out.")
    return cls(**{key: value for key, value in config.items() if key in fields})


def check_on_failure(value: Any) -> None:
    """Refuse what `on_failure` cannot be.

    Raises:
        ConfigError: it is none of ON_FAILURE.
    """
    one_of("env.on_failure", value, ON_FAILURE)


def checked_batch(logs: Sequence[Any], metadata: Sequence[Any]) -> None:
    """Refuse batches that cannot be stepped.

    Raises:
        DataError: not one metadata for each row.
    """
    if len(logs) != len(metadata):
        raise DataError(f"step: expected metadata for each of {len(logs)} rows, got {len(metadata)}. Give one a row.")


def bare(log: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A message log's messages as role and content, an environment's as a user's; tokens stay behind."""
    roles = {"environment": "user"}
    return [{"role": roles.get(str(m.get("role")), m.get("role")), "content": m.get("content")} for m in log]


def last_action(log: Sequence[Mapping[str, Any]]) -> str:
    """What the policy said last.

    Raises:
        DataError: the log does not end with an assistant's text.
    """
    last: Mapping[str, Any] = log[-1] if len(log) else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise DataError(f"step: expected a log that ends with an assistant's text, got {dict(last)!r:.200}. Mend it.")
    return str(last["content"])


# --- a whole batch ----------------------------------------------------------------------------------------------------


def batch_rewards(batch: Mapping[str, Any]) -> list[float]:
    """The rewards of a batch under `rewards`, or `total_reward` as rollouts have it; NaN where a row failed."""
    found = batch.get("rewards")
    found = batch.get("total_reward") if found is None else found
    values = [] if found is None else found.tolist() if hasattr(found, "tolist") else list(found)
    return [float(value) for value in values]


def summary(rewards: Sequence[float], prefix: str, *, num_samples: int | None = None) -> dict[str, float]:
    """`PREFIX/num_samples`, `num_no_reward` and mean, std, min and max of the rewards that are numbers.

    std is that of a sample, as torch's, and 0.0 for one reward. Of none there are no statistics.
    """
    known = [reward for reward in rewards if math.isfinite(reward)]
    figures: dict[str, float] = {
        "num_samples": len(rewards) if num_samples is None else num_samples,
        "num_no_reward": len(rewards) - len(known),
    }
    if known:
        figures |= {
            "mean_reward": statistics.fmean(known),
            "std_reward": statistics.stdev(known) if len(known) > 1 else 0.0,
            "min_reward": min(known),
            "max_reward": max(known),
        }
    return {f"{prefix}/{name}": float(value) for name, value in figures.items()}


@dataclass(slots=True)
class Running:
    """Count, mean, std, min and max of numbers that come one by one, without keeping them (Welford)."""

    num: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared differences from the mean."""
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Take one more."""
        self.num += 1
        delta = value - self.mean
        self.mean += delta / self.num
        self.squares += delta * (value - self.mean)
        self.low, self.high = min(self.low, value), max(self.high, value)

    def metrics(self) -> dict[str, float]:
        """As `summary` has them, without a prefix; nothing but the count before the first."""
        if not self.num:
            return {"num_samples": 0.0}
        std = math.sqrt(self.squares / (self.num - 1)) if self.num > 1 else 0.0
        return {
            "num_samples": float(self.num), "mean_reward": self.mean, "std_reward": std,
            "min_reward": self.low, "max_reward": self.high,
        }  # fmt: skip


def batch_metrics(batch: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """`summary` of a batch of NeMo RL's."""
    rewards, logs = batch_rewards(batch), batch.get("message_log")
    return summary(rewards, prefix, num_samples=None if logs is None else len(logs))


def masked(batch: Any, groups: Sequence[Hashable] | None = None) -> Any:
    """A copy of a batch in which rows of reward NaN are not learned from, nor move the baseline of their siblings.

    Their `loss_multiplier` is 0 and their `mask_sample` true. NeMo RL's baselines count every row of a prompt, so that
    a number has to stand in the reward's place, and in that of each of its parts: the mean of the siblings that have
    one, which leaves a mean where it is; 0.0 where none has. `groups` says whose siblings rows are; by default those of
    one prompt in `message_log`, as NeMo RL's baselines have it, or of one `idx` where there are no logs: rollouts of
    single samples number the rows there.

    Call it between the rollout and the advantages: NeMo RL itself does not.

    Raises:
        DataError: rows failed, and nothing says which belong together.
    """
    import torch

    rewards = batch_rewards(batch)
    failed = [not math.isfinite(reward) for reward in rewards]
    if not any(failed):
        return batch
    keys = _siblings(batch) if groups is None else list(groups)
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


def _siblings(batch: Mapping[str, Any]) -> list[Hashable]:
    """For each row what it shares with its siblings."""
    logs = batch.get("message_log")
    if logs is not None:
        return [tuple((m.get("role"), str(m.get("content"))) for m in prompt_of(log, log) or log) for log in logs]
    ids: Any = batch.get("idx")
    return list(ids.tolist() if hasattr(ids, "tolist") else ids or ())


def _filled(values: Sequence[float], keys: Sequence[Hashable]) -> list[float]:
    """The values, with the mean of the siblings' in the place of those that are no numbers."""
    known: dict[Hashable, list[float]] = {key: [] for key in keys}
    for key, value in zip(keys, values, strict=True):
        known[key] += [value] if math.isfinite(value) else []
    means = {key: statistics.fmean(each) if each else 0.0 for key, each in known.items()}
    return [value if math.isfinite(value) else means[key] for key, value in zip(keys, values, strict=True)]
