"""What takes the place of a reward that nobody knows, where a trainer's tensor needs a number: an explicit choice.

Rewards here are None where the grader failed. Statistics leave them out before and after; see `statistics.py`.
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
"""RM-Gallery's mark of a reward that could not be had, as its verl tutorial writes it."""


class InvalidPolicy(StrEnum):
    """What becomes of a response without a reward."""

    KEEP = "keep"
    """INVALID_REWARD, as RM-Gallery does: who reads the tensor must look for it, or it ruins a group's mean."""
    GROUP_MEAN = "group_mean"
    """The mean of the group's other rewards, so that it has no advantage; masked where there are none."""
    ZERO = "zero"
    """0.0, which says that the response was bad: only for rewards whose 0.0 is neutral."""
    MASK = "mask"
    """0.0, and the response is not trained on."""
    RAISE = "raise"
    """InfraError: the batch is not trained on."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Rewards as a tensor takes them."""

    rewards: list[float]
    """[number of responses]"""
    mask: list[bool]
    """[number of responses] False where the response must not be trained on."""
    num_invalid: int
    """Responses that have no reward of their own."""


def apply_policy(results: Sequence[RewardResult], groups: Sequence[Hashable], policy: InvalidPolicy | str) -> Applied:
    """Numbers for all responses.

    Args:
        results: one per response.
        groups: the key of each response's group; only GROUP_MEAN reads them.
        policy: what takes the place of a reward that is not known.

    Raises:
        ConfigError: no such policy, or not one group key per response.
        InfraError: under RAISE, where a reward is missing, naming how many and why.
    """
    chosen = _policy(policy)
    if len(results) != len(groups):
        raise ConfigError(
            f"groups: expected a key for each of {len(results)} responses, got {len(groups)}. Pass them all."
        )
    invalid = [result for result in results if result.reward is None]
    if invalid and chosen is InvalidPolicy.RAISE:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(str(r.status) for r in invalid).items())
        raise InfraError(
            f"rewards: expected one for each of {len(results)} responses, got none for {len(invalid)} ({kinds}; the "
            f"first: {invalid[0].detail or 'no detail'}). Mend the grader, or choose another invalid policy."
        )
    means = _group_means(results, groups) if chosen is InvalidPolicy.GROUP_MEAN else {}
    rewards, mask = [], []
    for result, group in zip(results, groups, strict=True):
        reward, trained = (result.reward, True) if result.reward is not None else _instead(chosen, means.get(group))
        rewards.append(float(reward))
        mask.append(trained)
    return Applied(rewards, mask, len(invalid))


def _policy(policy: InvalidPolicy | str) -> InvalidPolicy:
    if policy in list(InvalidPolicy):
        return InvalidPolicy(policy)
    known = ", ".join(InvalidPolicy)
    raise ConfigError(f"invalid policy: expected one of {known}, got {policy!r}. Change the value.")


def _instead(policy: InvalidPolicy, mean: float | None) -> tuple[float, bool]:
    if policy is InvalidPolicy.KEEP:
        return INVALID_REWARD, True
    if policy is InvalidPolicy.GROUP_MEAN and mean is not None:
        return mean, True
    return 0.0, policy is InvalidPolicy.ZERO


def _group_means(results: Sequence[RewardResult], groups: Sequence[Hashable]) -> dict[Hashable, float]:
    rewards: dict[Hashable, list[float]] = {}
    for result, group in zip(results, groups, strict=True):
        if result.reward is not None:
            rewards.setdefault(group, []).append(result.reward)
    return {group: fsum(values) / len(values) for group, values in rewards.items()}
