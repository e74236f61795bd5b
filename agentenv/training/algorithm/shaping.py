"""Reward shaping before advantages: penalties for length, and dynamic filtering by score.

Shapes: N action tokens, E episodes. `advantages.add_at_the_end` adds an episode's penalty to its last action token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentenv.errors import ConfigError
from agentenv.training.algorithm.advantages import ActionTokens


def overlong_penalty(num_tokens_E: Tensor, *, limit_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """Return float64[E] in [-factor, 0], linearly falling over the last `buffer_tokens` before `limit_tokens`.

    `num_tokens_E` counts sampled tokens only, not observations.
    Source: soft overlong punishment of DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13.

    Raises:
        ConfigError: the buffer is empty or longer than `limit_tokens`.
    """
    if not 0 < buffer_tokens <= limit_tokens:
        raise ConfigError(
            f"overlong_buffer_len: expected 1 to {limit_tokens} tokens, got {buffer_tokens}. Shorten the buffer."
        )
    over_E = num_tokens_E.double() - (limit_tokens - buffer_tokens)
    return -over_E.clamp(0, buffer_tokens) / buffer_tokens * factor


def truncated_rewards(tokens: ActionTokens, truncated_E: Tensor, coef: float) -> Tensor:
    """Return float64[N], rewards in which a truncated episode's R becomes coef·R, or coef if it is negative.

    Each turn's reward is scaled on its own, so credit per turn stays correct. A negative coefficient replaces all
    rewards and is paid at the end. Source: ProRL's "stop properly" penalty, as in OpenRLHF.

    Raises:
        ConfigError: the coefficient is above 1.
    """
    if coef > 1:
        raise ConfigError(f"stop_properly_penalty_coef: expected a number up to 1, got {coef!r}. Lower it.")
    truncated_N, rewards_N = truncated_E.bool()[tokens.episode_N], tokens.rewards_N.double()
    instead_N = coef * rewards_N if coef >= 0 else coef * tokens.episode_ends_N
    return torch.where(truncated_N, instead_N, rewards_N)


@dataclass(frozen=True, slots=True)
class FilteredGroups:
    """Groups to train on, and counts of rejected ones."""

    kept: tuple[int, ...]
    """Indices of groups with a mean score inside the range."""
    num_low: int
    """Rejected groups with a mean at or below the lower bound."""
    num_high: int
    """Rejected groups with a mean at or above the upper bound."""
    num_unscored: int
    """Rejected groups without any score."""

    @property
    def rejection_rate(self) -> float:
        """Share of rejected groups; 0.0 without groups."""
        rejected = self.num_low + self.num_high + self.num_unscored
        return rejected / max(1, rejected + len(self.kept))


def filter_groups(scores: Sequence[Sequence[float | None]], *, low: float, high: float) -> FilteredGroups:
    """Keep groups with low < mean score < high. Members without a score do not count.

    If all members of a group are solved or all failed, their advantages are 0.
    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.

    Raises:
        ConfigError: the range is empty.
    """
    if not low < high:
        raise ConfigError(f"dynamic_filtering_reward_range: expected low < high, got {low} and {high}. Widen it.")
    known = [[score for score in group if score is not None] for group in scores]
    means = [sum(group) / len(group) if group else None for group in known]
    return FilteredGroups(
        kept=tuple(i for i, mean in enumerate(means) if mean is not None and low < mean < high),
        num_low=sum(mean is not None and mean <= low for mean in means),
        num_high=sum(mean is not None and mean >= high for mean in means),
        num_unscored=means.count(None),
    )
