"""What one micro-batch adds to the loss of an optimiser step, and to its metrics.

Shapes: N action tokens of a batch, n of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from agentenv.trainer.batch import MicroBatch
from agentenv.trainer.critic import Critic
from agentenv.trainer.losses import LossOptions, PolicyInputs, kl_estimate, policy_loss, value_loss
from agentenv.trainer.policy import Policy

Share = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch to its part of the loss, with a gradient, and of the metrics; their sums are those of the step."""


@dataclass(slots=True, eq=False)
class Known:
    """What is known of the action tokens while a train step runs; float32[N] on the learner's device."""

    rollout_logprobs_N: Tensor
    """Of the engine; NaN where missing."""
    logprobs_N: Tensor
    """Of the policy before the step; NaN until they are computed."""
    advantages_N: Tensor
    returns_N: Tensor
    values_N: Tensor | None = None
    """Of the critic before the step."""
    ref_logprobs_N: Tensor | None = None
    has_old: bool = False
    """Whether `logprobs_N` was computed by a pass of its own; else it is that of the one optimiser step there is."""


def policy_share(policy: Policy, known: Known, weights_N: Tensor, options: LossOptions) -> Share:
    """The policy's share; `weights_N` are of `token_weights`, 0 outside of the optimiser step."""

    def share(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and what it says of itself."""
        scores = policy.score(micro, entropy_gradient=options.entropy_coef != 0.0)
        at, weights_n = micro.index_n, weights_N[micro.index_n]
        if not known.has_old:  # the one optimiser step: this is the policy before it, exactly
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

    return share


def critic_share(critic: Critic, known: Known, weights_N: Tensor, *, clip: float) -> Share:
    """The critic's share, weighed as the policy's."""

    def share(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The value loss of a micro-batch."""
        assert known.values_N is not None
        at = micro.index_n
        values_n, _ = critic.values(micro)
        loss_n = value_loss(values_n, known.values_N[at], known.returns_N[at], clip=clip)
        loss = (weights_N[at] * loss_n).sum()
        return loss, {"value_loss": loss.detach()}

    return share
