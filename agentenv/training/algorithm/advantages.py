"""Advantages of action tokens, with credit per episode or per turn.

Shapes: N action tokens of a whole batch, one episode after another, turns in order; E episodes; X compared items of a
group: episodes or turns. Computation is in float64, so that equal rewards stay equal; results are float32. Observations
are not on the axis: γ and λ apply from the last token of an action to the first of the next one.

Credit "episode" gives each token of an episode the sum of its rewards. Credit "turn" gives tokens of turn k the
rewards of turn k and later, and compares them with the k-th turns of the group's episodes that have one. Segments of an
episode form one chain: a reward in a later segment reaches the earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentenv.errors import ConfigError
from agentenv.training.config import Estimator

Per = Literal["token", "turn"]
Credit = Literal["episode", "turn"]

STD_EPS = 1e-9
"""Added to a group's standard deviation (group_norm)."""
MIN_VARIANCE = 1e-8
"""Lower bound of the variance in whitening."""


@dataclass(frozen=True, slots=True, eq=False)
class ActionTokens:
    """The action tokens of a batch: episode, turn, reward and group."""

    episode_N: Tensor
    """int64[N] index of the episode, from 0, ascending; every episode has a token."""
    turn_N: Tensor
    """int64[N] index of the turn in its episode, from 0, ascending."""
    rewards_N: Tensor
    """float64[N] the environment's rewards; a turn's reward is at the last token of its action."""
    group_E: Tensor
    """int64[E] index of the episode's group."""

    @property
    def episode_ends_N(self) -> Tensor:
        """bool[N] True at the last action token of an episode."""
        return ends_of(self.episode_N)

    @property
    def turn_ends_N(self) -> Tensor:
        """bool[N] True at the last token of an action."""
        return ends_of(self.episode_N) | ends_of(self.turn_N)


def ends_of(ids_N: Tensor) -> Tensor:
    """Return bool[N], True at the last occurrence of each value of an ascending column."""
    return torch.cat([ids_N[1:] != ids_N[:-1], torch.ones(min(1, len(ids_N)), dtype=torch.bool)])


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """Options of the estimators. OpenRLHF uses credit "episode", decay_per "token" and reward_clip (-10, 10)."""

    estimator: Estimator = "reinforce_baseline"
    credit: Credit = "turn"
    gamma: float = 1.0
    """Discount. Estimators that compare whole episodes ignore it."""
    lam: float = 1.0
    """λ of GAE."""
    decay_per: Per = "turn"
    """Apply γ and λ from token to token, or only from turn to turn."""
    kl_coef: float = 0.0
    """β of the KL penalty in the reward."""
    reward_clip: tuple[float, float] | None = None
    """Bounds of a reward after its baseline is subtracted."""
    scale: bool = True
    """Divide by the standard deviation in whitening; False only subtracts the mean."""


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """Advantages and returns, float32[N] each."""

    advantages_N: Tensor
    returns_N: Tensor
    """Targets of the value head (gae), otherwise the advantages before whitening."""


def estimate(
    tokens: ActionTokens,
    options: AdvantageOptions,
    *,
    kl_N: Tensor | None = None,
    values_N: Tensor | None = None,
    bootstrap_E: Tensor | None = None,
) -> Advantages:
    """Return the advantage of every action token.

    Args:
        tokens: the whole batch, because baselines and whitening need all of it.
        options: the estimator and its constants.
        kl_N: [N] estimated KL divergence from the reference at each token, for a penalty in the reward.
        values_N: [N] the critic's value of the state before each token, for gae.
        bootstrap_E: [E] for gae, the value of the state in which an episode was truncated; 0 if it terminated.

    Raises:
        ConfigError: gae without values.
    """
    penalty_N = torch.zeros_like(tokens.rewards_N) if kl_N is None else -options.kl_coef * kl_N.double()
    if options.estimator == "gae":
        if values_N is None:
            raise ConfigError("estimator: expected values for gae, got none. Add a value head to the model.")
        rewards_N = _clipped(_credited(tokens, options.credit), options) + penalty_N
        if bootstrap_E is not None:
            rewards_N[tokens.episode_ends_N] += options.gamma * bootstrap_E.double()
        gamma_N, lam_N = (decays(tokens, rate, options.decay_per) for rate in (options.gamma, options.lam))
        advantages_N, returns_N = gae(rewards_N, values_N.double(), gamma_N, lam_N)
    elif options.estimator == "reinforce":
        rewards_N = _clipped(_credited(tokens, options.credit), options)
        returns_N = returns_to_go(rewards_N + penalty_N, decays(tokens, options.gamma, options.decay_per))
        advantages_N = returns_N
    else:
        compared_N = _compared(tokens, options)
        returns_N = compared_N + returns_to_go(penalty_N, decays(tokens, 1.0, "token"))
        advantages_N = returns_N
    if options.estimator in ("gae", "reinforce", "reinforce_baseline"):
        advantages_N = whiten(advantages_N, scale=options.scale)
    return Advantages(advantages_N.float(), returns_N.float())


def decays(tokens: ActionTokens, rate: float, per: Per) -> Tensor:
    """Return float64[N], the factor of the next token's value; 0 at the end of an episode.

    Per token it is `rate` everywhere; per turn it is `rate` at the last token of an action and 1 inside.
    """
    decay_N = torch.full_like(tokens.rewards_N, rate)
    if per == "turn":
        decay_N[~tokens.turn_ends_N] = 1.0
    return decay_N.masked_fill(tokens.episode_ends_N, 0.0)


def returns_to_go(rewards_N: Tensor, decay_N: Tensor) -> Tensor:
    """Return float64[N], G_t = r_t + d_t·G_{t+1}. With d = 0 at ends of episodes one pass does a whole batch."""
    total, backwards = 0.0, []
    for reward, decay in zip(reversed(rewards_N.tolist()), reversed(decay_N.tolist()), strict=True):
        total = reward + decay * total
        backwards.append(total)
    return torch.tensor(backwards[::-1], dtype=torch.float64)


def gae(rewards_N: Tensor, values_N: Tensor, gamma_N: Tensor, lam_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, float64[N] each: A_t = δ_t + γ_t λ_t A_{t+1}, δ_t = r_t + γ_t V_{t+1} - V_t.

    `gamma_N` and `lam_N` come from `decays`. Source: Schulman et al. 2015, arXiv:1506.02438.
    """
    next_N = torch.cat([values_N[1:], values_N.new_zeros(min(1, len(values_N)))])
    advantages_N = returns_to_go(rewards_N + gamma_N * next_N - values_N, gamma_N * lam_N)
    return advantages_N, advantages_N + values_N


def whiten(values_N: Tensor, *, scale: bool = True) -> Tensor:
    """Return values with mean 0 and, with `scale`, variance 1 over the batch; equal values become exactly 0."""
    if len(values_N) == 0 or bool(values_N.max() == values_N.min()):
        return torch.zeros_like(values_N)
    centred_N = values_N - values_N.mean()
    return centred_N * centred_N.square().mean().clamp(min=MIN_VARIANCE).rsqrt() if scale else centred_N


def compare(values_X: Tensor, cell_X: Tensor, estimator: Estimator) -> Tensor:
    """Return float64[X], the values minus the baseline of their cell. Values of a cell are compared with each other.

    - rloo: v - mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)
    - reinforce_baseline, flash_reinforce: v - mean
    - dr_grpo: v - mean (Liu et al. 2025, arXiv:2503.20783); its loss is `seq-mean-token-sum-norm`
    - group_norm: (v - mean) / (std + 1e-9), std with n - 1 (GRPO: Shao et al. 2024, arXiv:2402.03300)

    A value that is alone in its cell, or equal to all others of it, becomes exactly 0.0.
    """
    num_cells = int(cell_X.max()) + 1 if len(cell_X) else 0
    count_C = torch.bincount(cell_X, minlength=num_cells).double()
    mean_X = (_sums(values_X, cell_X, num_cells) / count_C.clamp(min=1))[cell_X]
    others_X = (count_C[cell_X] - 1).clamp(min=1)
    centred_X = values_X - mean_X
    if estimator == "rloo":
        centred_X = centred_X * count_C[cell_X] / others_X
    elif estimator == "group_norm":
        std_X = (_sums(centred_X.square(), cell_X, num_cells)[cell_X] / others_X).sqrt()
        centred_X = centred_X / (std_X + STD_EPS)
    smallest_C, largest_C = (
        values_X.new_zeros(num_cells).scatter_reduce(0, cell_X, values_X, how, include_self=False)
        for how in ("amin", "amax")
    )
    return centred_X.masked_fill((smallest_C == largest_C)[cell_X], 0.0)


def episode_sums(values_N: Tensor, tokens: ActionTokens) -> Tensor:
    """Return float64[E], the sum of each episode's values."""
    return _sums(values_N.double(), tokens.episode_N, len(tokens.group_E))


def add_at_the_end(tokens: ActionTokens, extra_E: Tensor) -> ActionTokens:
    """Return the tokens with `extra_E` added to the reward at each episode's last action token."""
    rewards_N = tokens.rewards_N.clone()
    rewards_N[tokens.episode_ends_N] += extra_E.double()
    return ActionTokens(tokens.episode_N, tokens.turn_N, rewards_N, tokens.group_E)


def _sums(values_X: Tensor, cell_X: Tensor, num_cells: int) -> Tensor:
    return values_X.new_zeros(num_cells).index_add_(0, cell_X, values_X)


def _credited(tokens: ActionTokens, credit: Credit) -> Tensor:
    """Return [N], the rewards at the ends of turns, or an episode's sum at its last token."""
    if credit == "turn":
        return tokens.rewards_N
    return torch.zeros_like(tokens.rewards_N).masked_scatter(
        tokens.episode_ends_N, episode_sums(tokens.rewards_N, tokens)
    )


def _clipped(values: Tensor, options: AdvantageOptions) -> Tensor:
    return values if options.reward_clip is None else values.clamp(*options.reward_clip)


def _compared(tokens: ActionTokens, options: AdvantageOptions) -> Tensor:
    """Return [N], returns minus baselines, equal for all tokens of an episode or of a turn."""
    group_E = torch.zeros_like(tokens.group_E) if options.estimator == "flash_reinforce" else tokens.group_E
    if options.credit == "episode":
        returns_X, cell_X, item_N = episode_sums(tokens.rewards_N, tokens), group_E, tokens.episode_N
    else:
        ends_N = tokens.turn_ends_N
        returns_X = returns_to_go(tokens.rewards_N, decays(tokens, options.gamma, "turn"))[ends_N]
        item_N = ends_N.cumsum(0) - ends_N.long()
        turn_X = tokens.turn_N[ends_N]
        cell_X = group_E[tokens.episode_N[ends_N]] * (int(turn_X.max()) + 1 if len(turn_X) else 1) + turn_X
    cell_X = torch.unique(cell_X, return_inverse=True)[1]
    return _clipped(compare(returns_X, cell_X, options.estimator), options)[item_N]
