"""Weights that correct for the difference between the engine that sampled and the model that trains.

Shapes: n action tokens of a micro-batch, whole sequences of them. p is the probability the engine sampled a token
with (after temperature), q the one that the training model gives it, with the weights that sampled it where nothing is
stale; ρ = q / p. Every weight is a constant: no gradient flows through it.

Tokens whose engine log-probability is missing (NaN) must not get here: `batch` takes their actions out of the loss,
because any number in its place, 0.0 above all, would be a ratio that nobody measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from agentenv.errors import ConfigError, DataError

Level = Literal["off", "token", "sequence"]
Mode = Literal["clip", "mask"]
Statistic = Literal["ratio", "binary_kl", "tv"]

_PROBABILITY_EPS = 1e-6
"""Probabilities are kept this far from 0 and 1 in divergences, whose logarithms stay finite then."""


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """Which correction: TIS is token/clip, IcePop token/mask, the sequence mask sequence/mask.

    FlashREINFORCE's is sequence/mask by binary_kl with low 0.
    """

    level: Level = "off"
    mode: Mode = "clip"
    statistic: Statistic = "ratio"
    low: float = 0.5
    high: float = 5.0
    truncate: bool = True
    """Whether the weights that a sequence mask keeps are cut to [low, high] too, where the statistic is the ratio.
    Without, one token of a kept sequence may weigh thousands: OpenRLHF 0.11.2 and NeMo RL, whatever their comments."""

    def __post_init__(self) -> None:
        """Refuse what no correction means.

        Raises:
            ConfigError: naming the fields.
        """
        choices: tuple[tuple[str, object], ...] = (("level", Level), ("mode", Mode), ("statistic", Statistic))
        for name, kind in choices:
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ConfigError(
                    f"correction {name}: expected one of {known}, got {getattr(self, name)!r}. Change it."
                )
        if self.mode == "clip" and (self.level == "sequence" or self.statistic != "ratio"):
            raise ConfigError(
                f"correction: expected mode clip with level token and statistic ratio, got {self.level} and "
                f"{self.statistic}. Only a token's ratio is a weight that can be cut: use mode mask."
            )
        if self.statistic != "ratio" and self.low > 0:
            raise ConfigError(
                f"correction: expected low 0 for {self.statistic}, got {self.low}. Give an upper bound only."
            )
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"correction: expected 0 <= low <= high, got {self.low} and {self.high}. Swap them.")


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What to multiply the policy's loss with."""

    weights_n: Tensor
    """float32[n] not negative; 0 where a token is masked."""
    rejected_n: Tensor
    """bool[n] tokens outside the band: masked, or cut to it."""


def correct(
    logprobs_n: Tensor, rollout_logprobs_n: Tensor, sequence_n: Tensor, options: CorrectionOptions
) -> Correction:
    """The weights that `options` ask for; all 1 with level "off".

    Args:
        logprobs_n: of the training model.
        rollout_logprobs_n: of the engine.
        sequence_n: int64[n] which sequence a token belongs to, from 0.
        options: which correction.

    Raises:
        DataError: a log-probability is NaN.
    """
    if options.level == "off":
        return Correction(torch.ones_like(logprobs_n), torch.zeros_like(logprobs_n, dtype=torch.bool))
    log_ratio_n = _log_ratio(logprobs_n, rollout_logprobs_n)
    if options.statistic != "ratio":
        statistic_n = divergence(logprobs_n.detach(), rollout_logprobs_n, options.statistic)
        if options.level == "sequence":
            statistic_n = sequence_means(statistic_n, sequence_n)
        return _masked(log_ratio_n.exp(), statistic_n, options)
    if options.level == "sequence":
        return sequence_mask(log_ratio_n, sequence_n, low=options.low, high=options.high, truncate=options.truncate)
    chosen = tis if options.mode == "clip" else icepop
    return chosen(log_ratio_n, low=options.low, high=options.high)


def tis(log_ratio_n: Tensor, *, low: float = 0.0, high: float = 2.0) -> Correction:
    """Truncated importance sampling: clip(ρ, low, high).

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    ratio_n = log_ratio_n.detach().exp()
    return Correction(ratio_n.clamp(low, high), (ratio_n < low) | (ratio_n > high))


def icepop(log_ratio_n: Tensor, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """IcePop: ρ where low ≤ ρ ≤ high, else 0. Source: Ling team 2025, arXiv:2510.18855."""
    ratio_n = log_ratio_n.detach().exp()
    return _masked(ratio_n, ratio_n, CorrectionOptions("token", "mask", low=low, high=high))


def sequence_mask(
    log_ratio_n: Tensor, sequence_n: Tensor, *, low: float = 0.5, high: float = 5.0, truncate: bool = True
) -> Correction:
    """Tokens of sequences whose geometric mean of ρ lies in [low, high] weigh ρ, with `truncate` cut to the band."""
    log_ratio_n = log_ratio_n.detach()
    ratio_n = log_ratio_n.exp()
    options = CorrectionOptions("sequence", "mask", low=low, high=high)
    weights_n = ratio_n.clamp(low, high) if truncate else ratio_n
    return _masked(weights_n, sequence_means(log_ratio_n, sequence_n).exp(), options)


def divergence(logprobs_n: Tensor, rollout_logprobs_n: Tensor, statistic: Statistic) -> Tensor:
    """[n] how far p and q are apart, seen as chances of this token against all others.

    binary_kl: p·log(p/q) + (1-p)·log((1-p)/(1-q)); tv: |p - q|. Source: FlashREINFORCE, as in OpenRLHF 0.11.2.
    """
    p_n = rollout_logprobs_n.exp().clamp(_PROBABILITY_EPS, 1 - _PROBABILITY_EPS)
    q_n = logprobs_n.exp().clamp(_PROBABILITY_EPS, 1 - _PROBABILITY_EPS)
    if statistic == "tv":
        return (p_n - q_n).abs()
    return p_n * (p_n / q_n).log() + (1 - p_n) * ((1 - p_n) / (1 - q_n)).log()


def sequence_means(values_n: Tensor, sequence_n: Tensor) -> Tensor:
    """[n] at each token the mean of its sequence's tokens; gradients flow."""
    num = int(sequence_n.max()) + 1 if len(sequence_n) else 0
    count_s = torch.bincount(sequence_n, minlength=num).to(values_n.dtype)
    sum_s = values_n.new_zeros(num).index_add(0, sequence_n, values_n)
    return (sum_s / count_s.clamp(min=1))[sequence_n]


def _masked(weights_n: Tensor, statistic_n: Tensor, options: CorrectionOptions) -> Correction:
    """Chosen, not multiplied: 0·inf would be NaN."""
    keep_n = (statistic_n >= options.low) & (statistic_n <= options.high)
    return Correction(torch.where(keep_n, weights_n, 0.0), ~keep_n)


def _log_ratio(logprobs_n: Tensor, rollout_logprobs_n: Tensor) -> Tensor:
    log_ratio_n = (logprobs_n - rollout_logprobs_n).detach()
    if log_ratio_n.isnan().any():
        raise DataError(
            f"correct: expected log-probabilities, got NaN at {int(log_ratio_n.isnan().sum())} of {len(log_ratio_n)} "
            "tokens. Take actions without log-probabilities out of the batch: trainer.batch does."
        )
    return log_ratio_n


def mismatch(logprobs_n: Tensor, rollout_logprobs_n: Tensor) -> float:
    """Mean |log q - log p| over tokens that have both; 0.0 on policy, NaN where no token has."""
    difference_n = (logprobs_n.detach() - rollout_logprobs_n).abs()
    return float(difference_n.nanmean()) if len(difference_n) else math.nan
