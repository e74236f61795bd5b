"""Losses of action tokens, one number each, and the weights that make one number of them.

Shapes: N action tokens of a whole optimiser step, n those of one micro-batch, which holds whole sequences. Losses are
[n] and are summed with `weights_n`, taken from `token_weights` of the whole step. So the losses of micro-batches add up
to the loss of the batch, whichever way it is split: never divide by anything of a micro-batch. Several processes that
average gradients multiply theirs by the number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from agentenv.errors import ConfigError
from agentenv.trainer.corrections import CorrectionOptions, correct, sequence_means

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PolicyLossType = Literal["ppo", "gspo"]
KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: beyond, clipping has long decided."""
MAX_KL = 10.0
"""Estimates of the KL divergence are cut here, per token."""
PER_TOKEN = ("entropy", "clip_ratio", "approx_kl", "is_rejected", "kl")
"""Metrics that say something of a token and are no part of the loss."""
MAX_KL_WEIGHT = 10.0
"""Largest importance weight of the unbiased gradient of the KL divergence."""


def token_weights(episode_N: Tensor, aggregation: Aggregation, *, max_tokens: int | None = None) -> Tensor:
    """float32[N] what each token's loss counts in the loss of the batch.

    - token-mean: 1/N. Every token counts alike, long episodes more (DAPO, arXiv:2503.14476).
    - seq-mean-token-mean: 1/(E·n_e), with n_e tokens of its episode. Episodes count alike (GRPO, arXiv:2402.03300).
    - seq-mean-token-sum-norm: 1/(E·max_tokens), a constant (Dr. GRPO, arXiv:2503.20783).

    An episode of several segments counts once, so that rendering its history anew gives it no second vote.

    Args:
        episode_N: int64[N] which episode a token is of; only tokens that are trained on.
        aggregation: one of the three.
        max_tokens: the most action tokens an episode may have.

    Raises:
        ConfigError: an unknown aggregation, or the third without `max_tokens`.
    """
    if aggregation not in get_args(Aggregation):
        known = ", ".join(get_args(Aggregation))
        raise ConfigError(f"loss_agg_mode: expected one of {known}, got {aggregation!r}. Choose one of them.")
    num = len(episode_N)
    ones_N = torch.ones(num, device=episode_N.device)
    if num == 0 or aggregation == "token-mean":
        return ones_N / max(1, num)
    index_N, count_E = torch.unique(episode_N, return_inverse=True, return_counts=True)[1:]
    if aggregation == "seq-mean-token-mean":
        return torch.div(ones_N, len(count_E) * count_E[index_N])
    if max_tokens is None or max_tokens < 1:
        raise ConfigError(f"loss_agg_mode: expected max_tokens with {aggregation}, got {max_tokens}. Give it.")
    return ones_N / (len(count_E) * max_tokens)


def log_ratio(logprobs_n: Tensor, old_logprobs_n: Tensor) -> Tensor:
    """[n] log of π / π_old, cut to ±20."""
    return (logprobs_n - old_logprobs_n.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(logprobs_n: Tensor, old_logprobs_n: Tensor, sequence_n: Tensor) -> Tensor:
    """[n] GSPO's: the mean of its sequence's log-ratios at each token, which has the gradient of that token alone.

    So each turn of a sequence is credited with its own advantage; where all are equal, a mean over the sequence's
    tokens has the gradient of the plain form. Source: GSPO-token of Zheng et al. 2025, arXiv:2507.18071, section 4.3.
    """
    detached_n = logprobs_n.detach()
    means_n = sequence_means(detached_n - old_logprobs_n.detach(), sequence_n)
    return (means_n + (logprobs_n - detached_n)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, eq=False)
class Clipped:
    """A policy loss per token, and where its gradient was cut."""

    loss_n: Tensor
    clipped_n: Tensor
    """bool[n] the ratio is outside the band on the side the advantage pulls to: no gradient."""


def clipped_surrogate(
    log_ratio_n: Tensor, advantages_n: Tensor, *, low: float = 0.2, high: float = 0.2, dual_clip: float | None = None
) -> Clipped:
    """PPO's -min(ρA, clip(ρ, 1-low, 1+high)·A); with `dual_clip` c never above -cA where A < 0.

    Sources: Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729.

    Raises:
        ConfigError: a dual clip that is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ConfigError(f"dual_clip: expected a number above 1, got {dual_clip!r}. Raise it, or leave it out.")
    ratio_n = log_ratio_n.exp()
    free_n, cut_n = ratio_n * advantages_n, ratio_n.clamp(1 - low, 1 + high) * advantages_n
    least_n = torch.minimum(free_n, cut_n)
    if dual_clip is not None:
        least_n = torch.where(advantages_n < 0, torch.maximum(least_n, dual_clip * advantages_n), least_n)
    return Clipped(-least_n, least_n.detach() != free_n.detach())


def kl_estimate(
    logprobs_n: Tensor,
    ref_logprobs_n: Tensor,
    estimator: KLEstimator = "k3",
    *,
    old_logprobs_n: Tensor | None = None,
    unbiased_gradient: bool = False,
) -> Tensor:
    """[n] estimates of KL(π ‖ π_ref), Δ = log π - log π_ref: k1 Δ, k2 Δ²/2, k3 e^-Δ - 1 + Δ; each cut to ±10.

    In a loss the gradients of k1 and k3 are not those of the KL divergence. With `unbiased_gradient` they are, for any
    estimator: w·Δ·∇log π, with w = π / π_old cut at 10. Source: Schulman, joschu.net/blog/kl-approx.html.

    Raises:
        ConfigError: an unknown estimator.
    """
    delta_n = logprobs_n - ref_logprobs_n.detach()
    if estimator == "k1":
        value_n = delta_n
    elif estimator == "k2":
        value_n = delta_n.square() / 2
    elif estimator == "k3":
        bounded_n = delta_n.clamp(min=-MAX_KL)  # before exp: its derivative would overflow where the value is cut
        value_n = torch.expm1(-bounded_n) + bounded_n
    else:
        raise ConfigError(f"kl_estimator: expected k1, k2 or k3, got {estimator!r}. Choose one of them.")
    value_n = value_n.clamp(-MAX_KL, MAX_KL)
    if not unbiased_gradient:
        return value_n
    weight_n = torch.ones_like(delta_n)
    if old_logprobs_n is not None:
        weight_n = (logprobs_n - old_logprobs_n).detach().exp().clamp(max=MAX_KL_WEIGHT)
    surrogate_n = weight_n * delta_n.square() / 2
    return value_n.detach() + surrogate_n - surrogate_n.detach()


def adapted_kl_coef(coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """The KL coefficient of a controller on its way to `target`. Source: Ziegler et al. 2019, arXiv:1909.08593."""
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_samples / horizon)


def value_loss(values_n: Tensor, old_values_n: Tensor, returns_n: Tensor, *, clip: float | None = None) -> Tensor:
    """[n] (V - G)²/2, with `clip` the larger of that and the one of V kept within ±clip of its old value."""
    loss_n = (values_n - returns_n).square()
    if clip is not None:
        near_n = old_values_n + (values_n - old_values_n).clamp(-clip, clip)
        loss_n = torch.maximum(loss_n, (near_n - returns_n).square())
    return loss_n / 2


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The policy's loss and what is added to it."""

    policy_loss_type: PolicyLossType = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction: CorrectionOptions = field(default_factory=CorrectionOptions)
    kl_coef: float = 0.0
    """β of a KL term in the loss; that of a penalty in the reward is in AdvantageOptions."""
    kl_estimator: KLEstimator = "k3"
    kl_unbiased_gradient: bool = False
    entropy_coef: float = 0.0
    """Entropy is added to what is maximised."""

    def __post_init__(self) -> None:
        """Refuse an unknown loss.

        Raises:
            ConfigError: naming it.
        """
        if self.policy_loss_type not in get_args(PolicyLossType):
            raise ConfigError(f"policy_loss_type: expected ppo or gspo, got {self.policy_loss_type!r}. Choose one.")


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """What is known of a micro-batch's action tokens when the model has scored them; float32[n] each."""

    logprobs_n: Tensor
    """Of the model that is trained; the one with a gradient."""
    old_logprobs_n: Tensor
    """Of the same model when the step began: π_old of the ratio."""
    advantages_n: Tensor
    weights_n: Tensor
    """Of `token_weights`."""
    sequence_n: Tensor
    """int64[n] from 0."""
    rollout_logprobs_n: Tensor | None = None
    """Of the engine; for a correction."""
    ref_logprobs_n: Tensor | None = None
    entropy_n: Tensor | None = None


def policy_loss(inputs: PolicyInputs, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the batch's loss, and of its metrics: both add up over micro-batches.

    Metrics: policy_loss, kl_loss, entropy, clip_ratio, approx_kl (old to new, k1), is_rejected; each weighed as the
    loss is. Those of `PER_TOKEN` are means of tokens once they are divided by the sum of the step's weights.

    Raises:
        ConfigError: the options ask for log-probabilities or an entropy that the inputs lack.
    """
    weights_n, detached = inputs.weights_n, inputs.logprobs_n.detach()
    if options.policy_loss_type == "gspo":
        log_ratio_n = sequence_log_ratio(inputs.logprobs_n, inputs.old_logprobs_n, inputs.sequence_n)
    else:
        log_ratio_n = log_ratio(inputs.logprobs_n, inputs.old_logprobs_n)
    clipped = clipped_surrogate(
        log_ratio_n, inputs.advantages_n, low=options.clip_low, high=options.clip_high, dual_clip=options.dual_clip
    )
    loss_n, metrics_n = clipped.loss_n, {"clip_ratio": clipped.clipped_n, "approx_kl": inputs.old_logprobs_n - detached}
    if options.correction.level != "off":
        rollout_n = _needed(inputs.rollout_logprobs_n, "rollout_logprobs_n", "a correction")
        correction = correct(inputs.old_logprobs_n, rollout_n, inputs.sequence_n, options.correction)
        loss_n = correction.weights_n * loss_n
        metrics_n["is_rejected"] = correction.rejected_n
    metrics_n["policy_loss"] = loss_n
    if options.kl_coef != 0.0:
        ref_n = _needed(inputs.ref_logprobs_n, "ref_logprobs_n", "kl_coef")
        kl_n = kl_estimate(
            inputs.logprobs_n, ref_n, options.kl_estimator,
            old_logprobs_n=inputs.old_logprobs_n, unbiased_gradient=options.kl_unbiased_gradient,
        )  # fmt: skip
        loss_n, metrics_n["kl_loss"] = loss_n + options.kl_coef * kl_n, kl_n
    if options.entropy_coef != 0.0:
        loss_n = loss_n - options.entropy_coef * _needed(inputs.entropy_n, "entropy_n", "entropy_coef")
    if inputs.entropy_n is not None:
        metrics_n["entropy"] = inputs.entropy_n
    return (weights_n * loss_n).sum(), {k: (weights_n * v.detach()).sum() for k, v in metrics_n.items()}


def _needed(tensor: Tensor | None, name: str, why: str) -> Tensor:
    if tensor is None:
        raise ConfigError(f"PolicyInputs.{name}: expected a tensor for {why}, got None. Compute it, or turn that off.")
    return tensor
