"""Replace unknown rewards by numbers where a trainer's tensor needs them, by an explicit policy.

A reward is None if its grader failed. Statistics leave it out before and after; see `groups/statistics.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.types import RewardResult

INVALID_REWARD = -999.0
"""RM-Gallery's mark of a missing reward, from its verl tutorial."""


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
    if policy not in list(InvalidPolicy):
        names = ", ".join(InvalidPolicy)
        raise ConfigError(f"invalid policy: expected one of {names}, got {policy!r}. Change the value.")
    chosen = InvalidPolicy(policy)
    if len(results) != len(groups):
        raise ConfigError(
            f"groups: expected a key for each of {len(results)} responses, got {len(groups)}. Pass them all."
        )
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
    rewards, mask = [], []
    for result, group in zip(results, groups, strict=True):
        reward = result.reward if result.reward is not None else means.get(group)
        if reward is not None:
            rewards.append(float(reward))
            mask.append(True)
        else:
            rewards.append(INVALID_REWARD if chosen is InvalidPolicy.KEEP else 0.0)
            mask.append(chosen in (InvalidPolicy.KEEP, InvalidPolicy.ZERO))
    return FilledRewards(rewards, mask, len(invalid))
