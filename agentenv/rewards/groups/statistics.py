"""Compute mean, standard deviation, minimum and maximum of rewards, scores and components, where there is a reward.

A reward is None if its grader failed: statistics leave it out. Where a trainer's tensor needs a number, `apply_policy`
replaces it by an explicit policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum, sqrt

from agentenv.core.arguments import one_of
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.types import RewardResult

INVALID_REWARD = -999.0
"""RM-Gallery's mark of a missing reward, from its verl tutorial."""
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
    _check_keys(results, groups)
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


def _check_keys(results: Sequence[RewardResult], groups: Sequence[Hashable]) -> None:
    if len(results) != len(groups):
        raise ConfigError(f"groups: expected a key for each of {len(results)} responses, got {len(groups)}.")


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


# --- missing rewards --------------------------------------------------------------------------------------------------


class InvalidPolicy(StrEnum):
    """What a response without a reward is given instead."""

    KEEP = "keep"
    """INVALID_REWARD, as in RM-Gallery: readers of the tensor must check for it, or it ruins a group's mean."""
    GROUP_MEAN = "group_mean"
    """The mean of the group's other rewards, so that it has no advantage; masked where there are none."""
    ZERO = "zero"
    """0.0, which marks the response as bad: only for rewards whose 0.0 is neutral."""
    MASK = "mask"
    """0.0, and the response is excluded from training."""
    RAISE = "raise"
    """Raise InfraError, so that the batch is not trained on."""


@dataclass(frozen=True, slots=True)
class FilledRewards:
    """Rewards without missing values, for a tensor."""

    rewards: list[float]
    """[number of responses]"""
    mask: list[bool]
    """[number of responses] False if the response must not be trained on."""
    num_invalid: int
    """Number of responses without a reward."""


def apply_policy(
    results: Sequence[RewardResult], groups: Sequence[Hashable], policy: InvalidPolicy | str
) -> FilledRewards:
    """Return a number for each response.

    Args:
        results: one per response.
        groups: the key of each response's group; only GROUP_MEAN reads them.
        policy: replaces unknown rewards.

    Raises:
        ConfigError: the policy is unknown, or there is not one group key per response.
        InfraError: under RAISE, if a reward is missing; says how many and why.
    """
    chosen = InvalidPolicy(one_of("invalid policy", policy, list(InvalidPolicy)))
    _check_keys(results, groups)
    invalid = [result for result in results if result.reward is None]
    if invalid and chosen is InvalidPolicy.RAISE:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(str(r.status) for r in invalid).items())
        raise InfraError(
            f"rewards: expected one for each of {len(results)} responses, got none for {len(invalid)} ({kinds}; the "
            f"first: {invalid[0].detail or 'no detail'}). Fix the grader, or choose another invalid policy."
        )
    known: dict[Hashable, list[float]] = {}
    for result, group in zip(results, groups, strict=True):
        if chosen is InvalidPolicy.GROUP_MEAN and result.reward is not None:
            known.setdefault(group, []).append(result.reward)
    means = {group: fsum(values) / len(values) for group, values in known.items()}
    filled = [means.get(key) if each.reward is None else each.reward for each, key in zip(results, groups, strict=True)]
    unknown = INVALID_REWARD if chosen is InvalidPolicy.KEEP else 0.0
    is_trained = chosen in (InvalidPolicy.KEEP, InvalidPolicy.ZERO)
    rewards = [unknown if reward is None else float(reward) for reward in filled]
    return FilledRewards(rewards, [is_trained or reward is not None for reward in filled], len(invalid))
