"""Weights that correct for the difference between the sampling engine and the trained model.

Shapes: n action tokens of a micro-batch, in whole sequences. p is the probability with which the engine sampled a token
(after temperature), q the trained model's probability of it; ρ = q / p. All weights are constants without gradient.

Tokens without an engine log-probability (NaN) must not be passed: `batch.build` leaves their actions out of the loss,
because any replacement would be an invented ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentenv.errors import DataError

Level = Literal["off", "token", "sequence"]
Mode = Literal["clip", "mask"]


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """Options of a correction, which weighs each token with ρ between `low` and `high`.

    - token/clip is truncated importance sampling, clip(ρ, low, high): Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training".
    - token/mask is IcePop, ρ inside and 0 outside: Ling team 2025, arXiv:2510.18855.
    - sequence/mask is ρ for tokens of sequences with a geometric mean of ρ inside, and 0 for the others.
    """

    level: Level = "off"
    mode: Mode = "clip"
    low: float = 0.5
    high: float = 5.0
    truncate: bool = True
    """Clamp the weights that a sequence mask keeps to [low, high]. Otherwise one token of a kept sequence may weigh
    thousands, as in OpenRLHF 0.11.2 and NeMo RL."""


def correct(
    logprobs_n: Tensor, rollout_logprobs_n: Tensor, sequence_n: Tensor, options: CorrectionOptions
) -> tuple[Tensor, Tensor]:
    """Return weights for the policy loss, float32[n] >= 0, and bool[n], True for tokens that are masked or clamped.

    Args:
        logprobs_n: log-probabilities of the trained model.
        rollout_logprobs_n: log-probabilities of the engine.
        sequence_n: int64[n] index of the sequence, from 0.
        options: a correction whose level is not "off".

    Raises:
        DataError: a log-probability is NaN.
    """
    log_ratio_n = (logprobs_n - rollout_logprobs_n).detach()
    if log_ratio_n.isnan().any():
        raise DataError(
            f"correct: expected log-probabilities, got NaN at {int(log_ratio_n.isnan().sum())} of {len(log_ratio_n)} "
            "tokens. Build the batch with batch.build(need_logprobs=True), which leaves such actions out."
        )
    ratio_n = log_ratio_n.exp()
    judged_n = sequence_means(log_ratio_n, sequence_n).exp() if options.level == "sequence" else ratio_n
    rejected_n = (judged_n < options.low) | (judged_n > options.high)
    if options.mode == "clip":
        return ratio_n.clamp(options.low, options.high), rejected_n
    if options.level == "sequence" and options.truncate:
        ratio_n = ratio_n.clamp(options.low, options.high)
    # torch.where instead of a product, because 0·inf is NaN.
    return torch.where(rejected_n, 0.0, ratio_n), rejected_n


def sequence_means(values_n: Tensor, sequence_n: Tensor) -> Tensor:
    """Return [n], at each token the mean over its sequence, with gradient."""
    num = int(sequence_n.max()) + 1 if len(sequence_n) else 0
    count_s = torch.bincount(sequence_n, minlength=num).to(values_n.dtype)
    sum_s = values_n.new_zeros(num).index_add(0, sequence_n, values_n)
    return (sum_s / count_s.clamp(min=1))[sequence_n]


def mismatch(logprobs_n: Tensor, rollout_logprobs_n: Tensor) -> float:
    """Return the mean |log q - log p| over tokens that have both; NaN if none does."""
    difference_n = (logprobs_n.detach() - rollout_logprobs_n).abs()
    return float(difference_n.nanmean()) if len(difference_n) else math.nan
