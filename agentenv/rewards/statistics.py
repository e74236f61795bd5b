"""Mean, standard deviation, least and most of rewards, scores and components; responses without a reward left out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

from agentenv.errors import ConfigError
from agentenv.rewards.types import RewardResult

COLUMNS = ("reward_mean", "reward_std", "reward_min", "reward_max")
"""The columns of `Statistics.columns`: of each response's group."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some numbers; all but the first None where there are none."""

    n_valid: int
    mean: float | None = None
    std: float | None = None
    """Of the numbers as the whole population, as numpy has it: 0.0 for one number."""
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a batch of responses. Names are `reward`, `score`, and `components/NAME` for each component."""

    batch: Mapping[str, Summary]
    groups: Mapping[Hashable, Mapping[str, Summary]]
    """By the group's key, in the order in which groups first appear."""
    columns: Mapping[str, list[float | None]]
    """One value per response for each of COLUMNS; None where no response of the group has a reward."""
    num_responses: int

    def metrics(self, prefix: str = "rewards/") -> dict[str, float]:
        """The batch's figures under flat names, for logs: `rewards/components/format/mean`."""
        figures = {
            f"{prefix}{name}/{figure}": float(value)
            for name, summary in self.batch.items()
            for figure in ("n_valid", "mean", "std", "min", "max")
            if (value := getattr(summary, figure)) is not None
        }
        return figures | {f"{prefix}num_invalid": float(self.num_responses - self.batch["reward"].n_valid)}


def statistics(results: Sequence[RewardResult], groups: Sequence[Hashable]) -> Statistics:
    """The figures of a batch, over the responses that have a reward; of a component over those where it is known.

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


def summary(values: Sequence[float]) -> Summary:
    """The figures of some numbers."""
    if not values:
        return Summary(0)
    low, high = float(min(values)), float(max(values))
    # Rounding may take a mean outside, by a last place; equal numbers must have a deviation of exactly zero.
    mean = min(max(fsum(values) / len(values), low), high)
    std = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
    return Summary(len(values), mean, std, low, high)


def _summaries(names: Sequence[str], results: Sequence[RewardResult]) -> dict[str, Summary]:
    valid = [result for result in results if result.reward is not None]
    return {name: summary([value for each in valid if (value := _value(each, name)) is not None]) for name in names}


def _value(result: RewardResult, name: str) -> float | None:
    if name == "reward":
        return result.reward
    if name == "score":
        return result.score
    return result.components.get(name.removeprefix("components/"))
