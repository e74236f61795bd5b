"""The losses of a micro-batch: its part of the loss and metrics of an optimizer step.

Shapes: N action tokens of a batch, n of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from agentenv.training.algorithm.batch import MicroBatch
from agentenv.training.algorithm.losses import LossOptions, PolicyInputs, kl_estimate, policy_loss, value_loss
from agentenv.training.learner.critic import Critic
from agentenv.training.learner.policy import Policy

MicroLoss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""Function from a micro-batch to its part of the step's loss, with gradient, and of its metrics."""


@dataclass(slots=True, eq=False)
class TokenState:
    """The state of action tokens during a train step; float32[N] on the learner's device."""

    rollout_logprobs_N: Tensor
    """Of the engine; NaN if missing."""
    logprobs_N: Tensor
    """Of the policy before the step; NaN before they are computed."""
    advantages_N: Tensor
    returns_N: Tensor
    values_N: Tensor | None = None
    """Of the critic before the step."""
    ref_logprobs_N: Tensor | None = None
    has_old: bool = False
    """True if a separate pass computed `logprobs_N`; otherwise the only optimizer step fills it."""


def policy_micro_loss(policy: Policy, known: TokenState, weights_N: Tensor, options: LossOptions) -> MicroLoss:
    """Return the policy's loss function. `weights_N` comes from `token_weights`, 0 outside of the optimizer step."""

    def micro_loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores = policy.score(micro, entropy_gradient=options.entropy_coef != 0.0)
        at, weights_n = micro.index_n, weights_N[micro.index_n]
        if not known.has_old:  # in the only optimizer step these are the log-probabilities before it
            known.logprobs_N[at] = scores.logprobs_n.detach()
        ref_n = None if known.ref_logprobs_N is None else known.ref_logprobs_N[at]
        inputs = PolicyInputs(
            scores.logprobs_n,
            known.logprobs_N[at],
            known.advantages_N[at],
            weights_n,
            micro.sequence_n,
            rollout_logprobs_n=known.rollout_logprobs_N[at],
            ref_logprobs_n=ref_n,
            entropy_n=scores.entropy_n,
        )
        loss, metrics = policy_loss(inputs, options)
        if ref_n is not None:
            kl_n = kl_estimate(scores.logprobs_n.detach(), ref_n, options.kl_estimator)
            metrics["kl"] = (weights_n * kl_n).sum()
        return loss, metrics | {"loss": loss.detach()}

    return micro_loss


def critic_micro_loss(critic: Critic, known: TokenState, weights_N: Tensor, *, clip: float) -> MicroLoss:
    """Return the critic's loss function, with the same weights."""

    def micro_loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert known.values_N is not None
        at = micro.index_n
        values_n, _ = critic.values(micro)
        loss_n = value_loss(values_n, known.values_N[at], known.returns_N[at], clip=clip)
        loss = (weights_N[at] * loss_n).sum()
        return loss, {"value_loss": loss.detach()}

    return micro_loss
