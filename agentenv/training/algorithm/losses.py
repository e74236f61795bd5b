"""Losses per action token, and the weights that sum them to the loss of a batch.

Shapes: N action tokens of a whole optimizer step, n of a micro-batch, which holds whole sequences. Losses are [n] and
are summed with `weights_n`, taken from `token_weights` of the whole step. So the losses of micro-batches add up to the
loss of the batch for any split: never divide by a quantity of a micro-batch. Processes that average gradients multiply
their losses by the number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from agentenv.training.algorithm.corrections import CorrectionOptions, correct, sequence_means

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PolicyLossType = Literal["ppo", "gspo"]
KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before exp, far outside any clip range."""
MAX_KL = 10.0
"""Bound of KL estimates per token."""
PER_TOKEN = ("entropy", "clip_ratio", "approx_kl", "is_rejected", "kl")
"""Metrics per token that are not part of the loss."""
MAX_KL_WEIGHT = 10.0
"""Largest importance weight of the unbiased gradient of the KL divergence."""


def token_weights(episode_N: Tensor, aggregation: Aggregation, *, limit_tokens: int) -> Tensor:
    """Return float32[N], the weight of each token's loss in the loss of the batch.

    - token-mean: 1/N. All tokens weigh the same, so long episodes weigh more (DAPO, arXiv:2503.14476).
    - seq-mean-token-mean: 1/(E·n_e), n_e tokens of the episode. All episodes weigh the same (GRPO, arXiv:2402.03300).
    - seq-mean-token-sum-norm: 1/(E·limit_tokens), a constant (Dr. GRPO, arXiv:2503.20783).

    An episode of several segments counts once.

    Args:
        episode_N: int64[N] index of the episode; only tokens that are trained on.
        aggregation: one of the three.
        limit_tokens: the largest number of action tokens in an episode, for the third.
    """
    num = len(episode_N)
    ones_N = torch.ones(num, device=episode_N.device)
    if num == 0 or aggregation == "token-mean":
        return ones_N / max(1, num)
    index_N, count_E = torch.unique(episode_N, return_inverse=True, return_counts=True)[1:]
    if aggregation == "seq-mean-token-mean":
        return torch.div(ones_N, len(count_E) * count_E[index_N])
    return ones_N / (len(count_E) * limit_tokens)


def log_ratio(logprobs_n: Tensor, old_logprobs_n: Tensor) -> Tensor:
    """Return [n], the log of π / π_old, clamped to ±20."""
    return (logprobs_n - old_logprobs_n.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(logprobs_n: Tensor, old_logprobs_n: Tensor, sequence_n: Tensor) -> Tensor:
    """Return [n], GSPO's log-ratio: the mean of the sequence's log-ratios, with the gradient of the token alone.

    So each turn of a sequence gets its own advantage. If all advantages are equal, a mean over the sequence's tokens
    has the gradient of the plain form. Source: GSPO-token of Zheng et al. 2025, arXiv:2507.18071, section 4.3.
    """
    detached_n = logprobs_n.detach()
    means_n = sequence_means(detached_n - old_logprobs_n.detach(), sequence_n)
    return (means_n + (logprobs_n - detached_n)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    log_ratio_n: Tensor, advantages_n: Tensor, *, low: float = 0.2, high: float = 0.2, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's -min(ρA, clip(ρ, 1-low, 1+high)·A); with `dual_clip` c at most -cA if A < 0.

    The second tensor is bool[n], True if the ratio is outside the clip range on the side of the advantage: no gradient.

    Sources: Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729.
    """
    ratio_n = log_ratio_n.exp()
    free_n, cut_n = ratio_n * advantages_n, ratio_n.clamp(1 - low, 1 + high) * advantages_n
    least_n = torch.minimum(free_n, cut_n)
    if dual_clip is not None:
        least_n = torch.where(advantages_n < 0, torch.maximum(least_n, dual_clip * advantages_n), least_n)
    return -least_n, least_n.detach() != free_n.detach()


def kl_estimate(
    logprobs_n: Tensor,
    ref_logprobs_n: Tensor,
    estimator: KLEstimator = "k3",
    *,
    old_logprobs_n: Tensor | None = None,
    unbiased_gradient: bool = False,
) -> Tensor:
    """Return [n], estimates of KL(π ‖ π_ref) with Δ = log π - log π_ref: k1 Δ, k2 Δ²/2, k3 e^-Δ - 1 + Δ; within ±10.

    In a loss, the gradients of k1 and k3 are not those of the KL divergence. With `unbiased_gradient` they are, for any
    estimator: w·Δ·∇log π, with w = π / π_old at most 10. Source: Schulman, joschu.net/blog/kl-approx.html.
    """
    delta_n = logprobs_n - ref_logprobs_n.detach()
    if estimator == "k1":
        value_n = delta_n
    elif estimator == "k2":
        value_n = delta_n.square() / 2
    else:
        bounded_n = delta_n.clamp(min=-MAX_KL)  # before exp, whose derivative would overflow
        value_n = torch.expm1(-bounded_n) + bounded_n
    value_n = value_n.clamp(-MAX_KL, MAX_KL)
    if not unbiased_gradient:
        return value_n
    weight_n = torch.ones_like(delta_n)
    if old_logprobs_n is not None:
        weight_n = (logprobs_n - old_logprobs_n).detach().exp().clamp(max=MAX_KL_WEIGHT)
    surrogate_n = weight_n * delta_n.square() / 2
    return value_n.detach() + surrogate_n - surrogate_n.detach()


def value_loss(values_n: Tensor, old_values_n: Tensor, returns_n: Tensor, *, clip: float | None = None) -> Tensor:
    """Return [n], (V - G)²/2; with `clip` the maximum of it and of that with V within ±clip of its old value."""
    loss_n = (values_n - returns_n).square()
    if clip is not None:
        near_n = old_values_n + (values_n - old_values_n).clamp(-clip, clip)
        loss_n = torch.maximum(loss_n, (near_n - returns_n).square())
    return loss_n / 2


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Options of the policy loss."""

    policy_loss_type: PolicyLossType = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction: CorrectionOptions = field(default_factory=CorrectionOptions)
    kl_coef: float = 0.0
    """β of a KL term in the loss. AdvantageOptions has the one of a penalty in the reward."""
    kl_estimator: KLEstimator = "k3"
    kl_unbiased_gradient: bool = False
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """The action tokens of a micro-batch after the model scored them; float32[n] each."""

    logprobs_n: Tensor
    """Of the trained model, with a gradient."""
    old_logprobs_n: Tensor
    """Of the model before the train step: π_old of the ratio."""
    advantages_n: Tensor
    weights_n: Tensor
    """From `token_weights`."""
    sequence_n: Tensor
    """int64[n] index of the sequence, from 0."""
    rollout_logprobs_n: Tensor | None = None
    """Of the engine, for a correction."""
    ref_logprobs_n: Tensor | None = None
    entropy_n: Tensor | None = None


def policy_loss(inputs: PolicyInputs, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the micro-batch's part of the batch's loss and metrics; both add up over micro-batches.

    Metrics: policy_loss, kl_loss, entropy, clip_ratio, approx_kl (old to new, k1), is_rejected; each has the weights of
    the loss. Divide those of `PER_TOKEN` by the sum of the step's weights for means over tokens.
    """
    weights_n, detached = inputs.weights_n, inputs.logprobs_n.detach()
    if options.policy_loss_type == "gspo":
        log_ratio_n = sequence_log_ratio(inputs.logprobs_n, inputs.old_logprobs_n, inputs.sequence_n)
    else:
        log_ratio_n = log_ratio(inputs.logprobs_n, inputs.old_logprobs_n)
    loss_n, clipped_n = clipped_surrogate(
        log_ratio_n, inputs.advantages_n, low=options.clip_low, high=options.clip_high, dual_clip=options.dual_clip
    )
    metrics_n = {"clip_ratio": clipped_n, "approx_kl": inputs.old_logprobs_n - detached}
    if options.correction.level != "off":
        assert inputs.rollout_logprobs_n is not None
        correction_n, metrics_n["is_rejected"] = correct(
            inputs.old_logprobs_n, inputs.rollout_logprobs_n, inputs.sequence_n, options.correction
        )
        loss_n = correction_n * loss_n
    metrics_n["policy_loss"] = loss_n
    if options.kl_coef != 0.0:
        assert inputs.ref_logprobs_n is not None
        kl_n = kl_estimate(
            inputs.logprobs_n, inputs.ref_logprobs_n, options.kl_estimator,
            old_logprobs_n=inputs.old_logprobs_n, unbiased_gradient=options.kl_unbiased_gradient,
        )  # fmt: skip
        loss_n, metrics_n["kl_loss"] = loss_n + options.kl_coef * kl_n, kl_n
    if options.entropy_coef != 0.0:
        assert inputs.entropy_n is not None
        loss_n = loss_n - options.entropy_coef * inputs.entropy_n
    if inputs.entropy_n is not None:
        metrics_n["entropy"] = inputs.entropy_n
    return (weights_n * loss_n).sum(), {k: (weights_n * v.detach()).sum() for k, v in metrics_n.items()}
