"""Compute mean, standard deviation, minimum and maximum of rewards, scores and components, where there is a reward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

from agentenv.errors import ConfigError
from agentenv.rewards.types import RewardResult

COLUMNS = ("reward_mean", "reward_std", "reward_min", "reward_max")
"""The columns of `Statistics.columns`, with figures of each response's group."""


@dataclass(frozen=True, slots=True)
class NumberSummary:
    """Figures of some numbers; all but the first are None if there are none."""

    n_valid: int
    mean: float | None = None
    std: float | None = None
    """Population standard deviation, as numpy's: 0.0 for one number."""
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of a batch of responses, by name: `reward`, `score`, and `components/NAME` for each component."""

    batch: Mapping[str, NumberSummary]
    groups: Mapping[Hashable, Mapping[str, NumberSummary]]
    """By the group's key, in the order in which groups first appear."""
    columns: Mapping[str, list[float | None]]
    """One value per response for each of COLUMNS; None if no response of the group has a reward."""
    num_responses: int

    def metrics(self, prefix: str = "rewards/") -> dict[str, float]:
        """Return the batch's figures under flat names, for logs: `rewards/components/format/mean`."""
        figures = {
            f"{prefix}{name}/{figure}": float(value)
            for name, summary in self.batch.items()
            for figure in ("n_valid", "mean", "std", "min", "max")
            if (value := getattr(summary, figure)) is not None
        }
        return figures | {f"{prefix}num_invalid": float(self.num_responses - self.batch["reward"].n_valid)}


def statistics(results: Sequence[RewardResult], groups: Sequence[Hashable]) -> Statistics:
    """Return the figures of a batch, over the responses that have a reward, and a value of each component.

    Args:
        results: one per response.
        groups: the key of each response's group.

    Raises:
        ConfigError: not one group key per response.
    """
    if len(results) != len(groups):
        raise ConfigError(
            f"groups: expected a key for each of {len(results)} responses, got {len(groups)}. Pass them all."
        )
    members: dict[Hashable, list[RewardResult]] = {}
    for result, group in zip(results, groups, strict=True):
        members.setdefault(group, []).append(result)
    names = ["reward", "score", *dict.fromkeys(f"components/{name}" for each in results for name in each.components)]
    by_group = {group: _summaries(names, group_results) for group, group_results in members.items()}
    columns = {
        column: [getattr(by_group[group]["reward"], column.removeprefix("reward_")) for group in groups]
        for column in COLUMNS
    }
    return Statistics(_summaries(names, results), by_group, columns, len(results))


def summary(values: Sequence[float]) -> NumberSummary:
    """Return the figures of some numbers."""
    if not values:
        return NumberSummary(0)
    low, high = float(min(values)), float(max(values))
    # Rounding may move a mean outside by a last place; equal numbers must have a deviation of exactly zero.
    mean = min(max(fsum(values) / len(values), low), high)
    std = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
    return NumberSummary(len(values), mean, std, low, high)


def _summaries(names: Sequence[str], results: Sequence[RewardResult]) -> dict[str, NumberSummary]:
    valid = [result for result in results if result.reward is not None]
    columns: dict[str, list[float | None]] = {
        "reward": [each.reward for each in valid],
        "score": [each.score for each in valid],
    }
    for name in names[2:]:
        columns[name] = [each.components.get(name.removeprefix("components/")) for each in valid]
    return {name: summary([value for value in columns[name] if value is not None]) for name in names}
