"""Weights that correct for the difference between the sampling engine and the trained model.

Shapes: n action tokens of a micro-batch, in whole sequences. p is the probability with which the engine sampled a token
(after temperature), q the trained model's probability of it; ρ = q / p. All weights are constants without gradient.

Tokens without an engine log-probability (NaN) must not be passed: `batch.build` leaves their actions out of the loss,
because any replacement would be an invented ratio.
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


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """Options of a correction. TIS is token/clip, IcePop token/mask, the sequence mask sequence/mask."""

    level: Level = "off"
    mode: Mode = "clip"
    low: float = 0.5
    high: float = 5.0
    truncate: bool = True
    """Clamp the weights that a sequence mask keeps to [low, high]. Otherwise one token of a kept sequence may weigh
    thousands, as in OpenRLHF 0.11.2 and NeMo RL."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: a value is unknown, or values contradict each other.
        """
        choices: tuple[tuple[str, object], ...] = (("level", Level), ("mode", Mode))
        for name, kind in choices:
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ConfigError(
                    f"correction {name}: expected one of {known}, got {getattr(self, name)!r}. Change it."
                )
        if self.mode == "clip" and self.level == "sequence":
            raise ConfigError("correction: expected mode clip with level token, got sequence. Use mode mask.")
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"correction: expected 0 <= low <= high, got {self.low} and {self.high}. Swap them.")


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Weights for the policy loss."""

    weights_n: Tensor
    """float32[n] >= 0; 0 for masked tokens."""
    rejected_n: Tensor
    """bool[n] True for tokens outside the bounds: masked or clamped."""


def correct(
    logprobs_n: Tensor, rollout_logprobs_n: Tensor, sequence_n: Tensor, options: CorrectionOptions
) -> Correction:
    """Return the weights of a correction; all 1 with level "off".

    Args:
        logprobs_n: log-probabilities of the trained model.
        rollout_logprobs_n: log-probabilities of the engine.
        sequence_n: int64[n] index of the sequence, from 0.
        options: the correction.

    Raises:
        DataError: a log-probability is NaN.
    """
    if options.level == "off":
        return Correction(torch.ones_like(logprobs_n), torch.zeros_like(logprobs_n, dtype=torch.bool))
    log_ratio_n = (logprobs_n - rollout_logprobs_n).detach()
    if log_ratio_n.isnan().any():
        raise DataError(
            f"correct: expected log-probabilities, got NaN at {int(log_ratio_n.isnan().sum())} of {len(log_ratio_n)} "
            "tokens. Build the batch with batch.build(need_logprobs=True), which leaves such actions out."
        )
    if options.level == "sequence":
        return sequence_mask(log_ratio_n, sequence_n, low=options.low, high=options.high, truncate=options.truncate)
    chosen = tis if options.mode == "clip" else icepop
    return chosen(log_ratio_n, low=options.low, high=options.high)


def tis(log_ratio_n: Tensor, *, low: float = 0.0, high: float = 2.0) -> Correction:
    """Return the weights of truncated importance sampling: clip(ρ, low, high).

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    ratio_n = log_ratio_n.detach().exp()
    return Correction(ratio_n.clamp(low, high), (ratio_n < low) | (ratio_n > high))


def icepop(log_ratio_n: Tensor, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """Return the weights of IcePop: ρ if low ≤ ρ ≤ high, else 0. Source: Ling team 2025, arXiv:2510.18855."""
    ratio_n = log_ratio_n.detach().exp()
    return _masked(ratio_n, ratio_n, CorrectionOptions("token", "mask", low=low, high=high))


def sequence_mask(
    log_ratio_n: Tensor, sequence_n: Tensor, *, low: float = 0.5, high: float = 5.0, truncate: bool = True
) -> Correction:
    """Return ρ for tokens of sequences with a geometric mean of ρ in [low, high]; with `truncate` clamped to it."""
    log_ratio_n = log_ratio_n.detach()
    ratio_n = log_ratio_n.exp()
    options = CorrectionOptions("sequence", "mask", low=low, high=high)
    weights_n = ratio_n.clamp(low, high) if truncate else ratio_n
    return _masked(weights_n, sequence_means(log_ratio_n, sequence_n).exp(), options)


def sequence_means(values_n: Tensor, sequence_n: Tensor) -> Tensor:
    """Return [n], at each token the mean over its sequence, with gradient."""
    num = int(sequence_n.max()) + 1 if len(sequence_n) else 0
    count_s = torch.bincount(sequence_n, minlength=num).to(values_n.dtype)
    sum_s = values_n.new_zeros(num).index_add(0, sequence_n, values_n)
    return (sum_s / count_s.clamp(min=1))[sequence_n]


def _masked(weights_n: Tensor, statistic_n: Tensor, options: CorrectionOptions) -> Correction:
    keep_n = (statistic_n >= options.low) & (statistic_n <= options.high)
    # torch.where instead of a product, because 0·inf is NaN.
    return Correction(torch.where(keep_n, weights_n, 0.0), ~keep_n)


def mismatch(logprobs_n: Tensor, rollout_logprobs_n: Tensor) -> float:
    """Return the mean |log q - log p| over tokens that have both; NaN if none does."""
    difference_n = (logprobs_n.detach() - rollout_logprobs_n).abs()
    return float(difference_n.nanmean()) if len(difference_n) else math.nan
