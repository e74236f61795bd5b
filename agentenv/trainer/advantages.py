"""Advantages of action tokens, by the estimators of the field, with credit per episode or per turn.

Shapes: N action tokens of a whole batch, episodes one after the other, turns in order; E episodes; X of what is
compared in a group: episodes or turns. All is float64 on the way, so that equal rewards stay equal, and float32 at the
end. Observations are not on the axis: γ and λ go from the last token of an action to the first of the next one.

Credit "episode" is the field's: the sum of an episode's rewards reaches all its tokens alike. Credit "turn": the tokens
of turn k get the rewards of turn k and later, and are compared with the k-th turns of their group, of those that
reached it. Segments of one episode are links of one chain: a reward in a later segment reaches the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from agentenv.errors import ConfigError, DataError

Estimator = Literal[
    "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce", "gae"
]  # fmt: skip
Per = Literal["token", "turn"]
Credit = Literal["episode", "turn"]

STD_EPS = 1e-9
"""Added to a group's standard deviation (group_norm)."""
MIN_VARIANCE = 1e-8
"""Smallest variance that whitening divides by the root of."""


@dataclass(frozen=True, slots=True, eq=False)
class ActionTokens:
    """What is known of a batch's action tokens before anything is learned from them."""

    episode_N: Tensor
    """int64[N] which episode, from 0, ascending; every episode has a token."""
    turn_N: Tensor
    """int64[N] which turn of its episode, from 0, ascending in the episode."""
    rewards_N: Tensor
    """float64[N] the environment's rewards: a turn's is at the last token of its action."""
    group_E: Tensor
    """int64[E] which group an episode belongs to."""

    def __post_init__(self) -> None:
        """Refuse rewards that are no numbers, and orders that would mix episodes up.

        Raises:
            DataError: naming what is wrong.
        """
        if not torch.isfinite(self.rewards_N).all():
            raise DataError(
                "ActionTokens.rewards_N: expected finite rewards, got others. Leave failed episodes out of the batch."
            )
        key_N = self.episode_N * (int(self.turn_N.max()) + 1 if len(self.turn_N) else 1) + self.turn_N
        episodes = torch.unique(self.episode_N)
        if (key_N.diff() < 0).any() or not torch.equal(episodes, torch.arange(len(self.group_E))):
            raise DataError(
                "ActionTokens: expected episodes 0, 1, … one after the other, their turns in order, got "
                f"{len(episodes)} of {len(self.group_E)} in another order. Build the batch with trainer.batch."
            )

    @property
    def episode_ends_N(self) -> Tensor:
        """bool[N] last action token of an episode."""
        return _ends(self.episode_N)

    @property
    def turn_ends_N(self) -> Tensor:
        """bool[N] last token of an action."""
        return _ends(self.episode_N) | _ends(self.turn_N)


def _ends(ids_N: Tensor) -> Tensor:
    return torch.cat([ids_N[1:] != ids_N[:-1], torch.ones(min(1, len(ids_N)), dtype=torch.bool)])


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """How advantages are estimated. OpenRLHF's way: credit "episode", decay_per "token", reward_clip (-10, 10)."""

    estimator: Estimator = "reinforce_baseline"
    credit: Credit = "turn"
    gamma: float = 1.0
    """Discount; of no effect on the estimators that compare whole episodes."""
    lam: float = 1.0
    """λ of GAE."""
    decay_per: Per = "turn"
    """Where γ and λ bite: from token to token, or only from one turn to the next."""
    kl_coef: float = 0.0
    """β of the KL penalty in the reward."""
    reward_clip: tuple[float, float] | None = None
    """Bounds of a reward after its baseline is taken off."""
    scale: bool = True
    """Whether whitening divides by the standard deviation; without, it only takes the mean off."""

    def __post_init__(self) -> None:
        """Refuse what no estimator means.

        Raises:
            ConfigError: naming the field.
        """
        choices: tuple[tuple[str, object], ...] = (("estimator", Estimator), ("credit", Credit), ("decay_per", Per))
        for name, kind in choices:
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ConfigError(f"{name}: expected one of {known}, got {getattr(self, name)!r}. Choose one of them.")
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}: expected a number in [0, 1], got {getattr(self, name)!r}. Change it.")


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """float32[N] each."""

    advantages_N: Tensor
    returns_N: Tensor
    """What a value head is fitted to (gae); the advantages before whitening otherwise."""


def estimate(
    tokens: ActionTokens,
    options: AdvantageOptions,
    *,
    kl_N: Tensor | None = None,
    values_N: Tensor | None = None,
    bootstrap_E: Tensor | None = None,
) -> Advantages:
    """The advantage of every action token.

    Args:
        tokens: the whole batch: baselines and whitening look across it.
        options: the estimator and its constants.
        kl_N: [N] an estimate of the KL divergence from the reference at each token, for a penalty in the reward.
        values_N: [N] what a value head says of the state before each token; for gae.
        bootstrap_E: [E] for gae: the value of the state in which an episode was cut short; 0 where it terminated.

    Raises:
        ConfigError: gae without values.
    """
    penalty_N = torch.zeros_like(tokens.rewards_N) if kl_N is None else -options.kl_coef * kl_N.double()
    if options.estimator == "gae":
        if values_N is None:
            raise ConfigError("estimator: expected values for gae, got none. Give the model a value head.")
        advantages_N, returns_N = _with_values(tokens, options, penalty_N, values_N.double(), bootstrap_E)
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
    """float64[N] what is kept of the value of the next token: 0 at the end of an episode.

    Per token it is `rate` everywhere; per turn it is `rate` at the last token of an action and 1 inside.
    """
    decay_N = torch.full_like(tokens.rewards_N, rate)
    if per == "turn":
        decay_N[~tokens.turn_ends_N] = 1.0
    return decay_N.masked_fill(tokens.episode_ends_N, 0.0)


def returns_to_go(rewards_N: Tensor, decay_N: Tensor) -> Tensor:
    """float64[N] G_t = r_t + d_t·G_{t+1}: with d 0 at episodes' ends, one pass for a whole batch."""
    total, backwards = 0.0, []
    for reward, decay in zip(reversed(rewards_N.tolist()), reversed(decay_N.tolist()), strict=True):
        total = reward + decay * total
        backwards.append(total)
    return torch.tensor(backwards[::-1], dtype=torch.float64)


def gae(rewards_N: Tensor, values_N: Tensor, gamma_N: Tensor, lam_N: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns, float64[N] each: A_t = δ_t + γ_t λ_t A_{t+1}, δ_t = r_t + γ_t V_{t+1} - V_t.

    `gamma_N` and `lam_N` are of `decays`. Source: Schulman et al. 2015, arXiv:1506.02438.
    """
    next_N = torch.cat([values_N[1:], values_N.new_zeros(min(1, len(values_N)))])
    advantages_N = returns_to_go(rewards_N + gamma_N * next_N - values_N, gamma_N * lam_N)
    return advantages_N, advantages_N + values_N


def whiten(values_N: Tensor, *, scale: bool = True) -> Tensor:
    """Mean 0 and, with `scale`, variance 1 over the batch's action tokens; all equal ones become exactly 0."""
    if len(values_N) == 0 or bool(values_N.max() == values_N.min()):
        return torch.zeros_like(values_N)
    centred_N = values_N - values_N.mean()
    return centred_N * centred_N.square().mean().clamp(min=MIN_VARIANCE).rsqrt() if scale else centred_N


def compare(values_X: Tensor, cell_X: Tensor, estimator: Estimator) -> Tensor:
    """float64[X] values minus the baseline of their cell: those that are compared with one another.

    - rloo: v - mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)
    - reinforce_baseline, flash_reinforce: v - mean
    - dr_grpo: v - mean (Liu et al. 2025, arXiv:2503.20783); its loss is `seq-mean-token-sum-norm`
    - group_norm: (v - mean) / (std + 1e-9), std with n - 1 (GRPO: Shao et al. 2024, arXiv:2402.03300)

    One that is alone in its cell, or whose cell is all equal, gets exactly 0.0: there is nothing to compare it with.
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
    ends = [values_X.new_zeros(num_cells).scatter_reduce(0, cell_X, values_X, how, include_self=False)
            for how in ("amin", "amax")]  # fmt: skip
    return centred_X.masked_fill((ends[0] == ends[1])[cell_X], 0.0)


def episode_sums(values_N: Tensor, tokens: ActionTokens) -> Tensor:
    """float64[E] the sum of each episode's values."""
    return _sums(values_N.double(), tokens.episode_N, len(tokens.group_E))


def add_at_the_end(tokens: ActionTokens, extra_E: Tensor) -> ActionTokens:
    """The same tokens with something added to each episode's reward, at its last action token."""
    rewards_N = tokens.rewards_N.clone()
    rewards_N[tokens.episode_ends_N] += extra_E.double()
    return ActionTokens(tokens.episode_N, tokens.turn_N, rewards_N, tokens.group_E)


def _sums(values_X: Tensor, cell_X: Tensor, num_cells: int) -> Tensor:
    return values_X.new_zeros(num_cells).index_add_(0, cell_X, values_X)


def _credited(tokens: ActionTokens, credit: Credit) -> Tensor:
    """[N] the rewards where they are paid: at the turns' ends, or all of an episode's at its last token."""
    if credit == "turn":
        return tokens.rewards_N
    return torch.zeros_like(tokens.rewards_N).masked_scatter(
        tokens.episode_ends_N, episode_sums(tokens.rewards_N, tokens)
    )


def _clipped(values: Tensor, options: AdvantageOptions) -> Tensor:
    return values if options.reward_clip is None else values.clamp(*options.reward_clip)


def _compared(tokens: ActionTokens, options: AdvantageOptions) -> Tensor:
    """[N] returns minus the baselines of their groups, the same on all tokens of an episode, or of a turn."""
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


def _with_values(
    tokens: ActionTokens,
    options: AdvantageOptions,
    penalty_N: Tensor,
    values_N: Tensor,
    bootstrap_E: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rewards_N = _clipped(_credited(tokens, options.credit), options) + penalty_N
    if bootstrap_E is not None:
        rewards_N = rewards_N.clone()
        rewards_N[tokens.episode_ends_N] += options.gamma * bootstrap_E.double()
    rates: Callable[[float], Tensor] = lambda rate: decays(tokens, rate, options.decay_per)  # noqa: E731
    return gae(rewards_N, values_N, rates(options.gamma), rates(options.lam))
