"""What happens to rewards and groups before advantages: penalties for length, and dynamic filtering by score.

Shapes: N action tokens, E episodes. What is to be added to an episode's reward goes to its last action token
(`advantages.add_at_the_end`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentenv.errors import ConfigError
from agentenv.trainer.advantages import ActionTokens


def overlong_penalty(num_tokens_E: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """float64[E] in [-factor, 0]: falls linearly over the last `buffer_tokens` before `max_tokens`.

    `num_tokens_E` are the tokens the policy sampled: observations are not its doing and are not punished.
    Source: soft overlong punishment of DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13.

    Raises:
        ConfigError: a buffer that is empty or longer than `max_tokens`.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ConfigError(
            f"overlong_buffer_len: expected 1 to {max_tokens} tokens, got {buffer_tokens}. Shorten the buffer."
        )
    over_E = num_tokens_E.double() - (max_tokens - buffer_tokens)
    return -over_E.clamp(0, buffer_tokens) / buffer_tokens * factor


def truncated_rewards(tokens: ActionTokens, truncated_E: Tensor, coef: float) -> Tensor:
    """float64[N] rewards with which a truncated episode's R becomes coef·R, or, where coef < 0, coef itself.

    Each turn keeps its share of its own reward: with credit per turn, what the last one loses is no other's. A negative
    coefficient is paid at the end, and nothing before. Source: ProRL's "stop properly" penalty, as OpenRLHF has it.

    Raises:
        ConfigError: a coefficient above 1.
    """
    if coef > 1:
        raise ConfigError(f"stop_properly_penalty_coef: expected a number up to 1, got {coef!r}. Lower it.")
    truncated_N, rewards_N = truncated_E.bool()[tokens.episode_N], tokens.rewards_N.double()
    instead_N = coef * rewards_N if coef >= 0 else coef * tokens.episode_ends_N
    return torch.where(truncated_N, instead_N, rewards_N)


@dataclass(frozen=True, slots=True)
class Filtered:
    """Which groups are worth training on."""

    kept: tuple[int, ...]
    """Indices of groups whose mean score lies inside the range."""
    num_low: int
    """Groups rejected because the mean is at or under the range's lower end."""
    num_high: int
    """Groups rejected because the mean is at or over its upper end."""
    num_unscored: int
    """Groups rejected because no member has a score."""

    @property
    def rejection_rate(self) -> float:
        """Share of the groups that were rejected; 0.0 of none."""
        rejected = self.num_low + self.num_high + self.num_unscored
        return rejected / max(1, rejected + len(self.kept))


def filter_groups(scores: Sequence[Sequence[float | None]], *, low: float, high: float) -> Filtered:
    """Keep groups with low < mean score < high, both strictly; a member without a score does not count.

    A group that is all solved or all failed has no member better than another, so nothing to learn from.
    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.

    Raises:
        ConfigError: an empty range.
    """
    if not low < high:
        raise ConfigError(f"dynamic_filtering_reward_range: expected low < high, got {low} and {high}. Widen it.")
    known = [[score for score in group if score is not None] for group in scores]
    means = [sum(group) / len(group) if group else None for group in known]
    return Filtered(
        kept=tuple(i for i, mean in enumerate(means) if mean is not None and low < mean < high),
        num_low=sum(mean is not None and mean <= low for mean in means),
        num_high=sum(mean is not None and mean >= high for mean in means),
        num_unscored=means.count(None),
    )
