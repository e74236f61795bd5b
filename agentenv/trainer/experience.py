"""From a batch and the flags to what a train step learns from: shaped rewards, and the advantages of action tokens.

Shapes: N action tokens of a batch, E its episodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentenv.trainer.advantages import ActionTokens, AdvantageOptions, Advantages, add_at_the_end
from agentenv.trainer.advantages import estimate as estimate_advantages
from agentenv.trainer.batch import Batch
from agentenv.trainer.corrections import CorrectionOptions
from agentenv.trainer.losses import Aggregation, LossOptions, kl_estimate
from agentenv.trainer.shaping import overlong_penalty, truncated_rewards

if TYPE_CHECKING:
    from agentenv.trainer.config import TrainConfig


def needs_rollout_logprobs(config: TrainConfig) -> bool:
    """Whether an action without the engine's log-probabilities can be in no loss: `batch.build(need_logprobs=...)`."""
    return config.is_correction != "off"


def kl_in_reward(config: TrainConfig) -> bool:
    """Whether the KL divergence from the reference is a penalty in the reward."""
    return config.init_kl_coef > 0 and not config.use_kl_loss


def correction_options(config: TrainConfig) -> CorrectionOptions:
    """What --is_correction and its threshold mean."""
    low, high = config.is_correction_threshold
    if config.is_correction == "tis":
        return CorrectionOptions("token", "clip", low=low, high=high)
    if config.is_correction == "icepop":
        return CorrectionOptions("token", "mask", low=low, high=high)
    if config.is_correction == "seq-mask-tis":
        return CorrectionOptions("sequence", "mask", low=low, high=high)
    return CorrectionOptions()


def loss_options(config: TrainConfig) -> LossOptions:
    """The policy's loss as the flags have it."""
    low, high = config.clip_range
    return LossOptions(
        config.policy_loss_type,
        clip_low=low,
        clip_high=high,
        dual_clip=config.dual_clip,
        correction=correction_options(config),
        kl_coef=config.init_kl_coef if config.use_kl_loss else 0.0,
        kl_estimator=config.kl_estimator,
        kl_unbiased_gradient=config.use_kl_loss,  # k1 as it stands has a gradient of 0 on average
        entropy_coef=config.entropy_loss_coef or 0.0,
    )


def aggregation(config: TrainConfig) -> tuple[Aggregation, int]:
    """How the losses of tokens are put together, and the most action tokens that an episode may have.

    GSPO is a mean over samples by definition, whatever --loss_agg_mode says: its ratio is that of a whole sequence.
    """
    mode: Aggregation = "seq-mean-token-mean" if config.policy_loss_type == "gspo" else config.loss_agg_mode
    return mode, config.max_len


def advantage_options(config: TrainConfig) -> AdvantageOptions:
    """How advantages are estimated; with credit per turn, γ and λ bite from turn to turn, else from token to token."""
    return AdvantageOptions(
        config.advantage_estimator,
        credit=config.credit,
        gamma=config.gamma,
        lam=config.lambd,
        decay_per="turn" if config.credit == "turn" else "token",
        kl_coef=config.init_kl_coef if kl_in_reward(config) else 0.0,
        reward_clip=config.reward_clip_range,
        scale=not config.no_advantage_std_norm,
    )


def sampled_lengths(batch: Batch, config: TrainConfig) -> Tensor:
    """int64[E] the tokens that --overlong_buffer_len judges: those of the longest turn where turns have a limit.

    Without --max_new_tokens, all of the episode. Prompts and observations are no one's fault: they never count.
    """
    tokens = batch.tokens
    if config.max_new_tokens is None:
        return torch.bincount(tokens.episode_N, minlength=len(tokens.group_E))
    ends_X = tokens.turn_ends_N.nonzero()[:, 0]
    lengths_X = ends_X.diff(prepend=torch.tensor([-1]))
    longest_E = torch.zeros(len(tokens.group_E), dtype=torch.int64)
    return longest_E.scatter_reduce(0, tokens.episode_N[ends_X], lengths_X, "amax")


def bootstrap(batch: Batch, after_S: Tensor) -> Tensor:
    """[E] the value of the state in which an episode was cut short; 0 of one that ended by itself.

    `after_S` is what the critic says after the last action of each sequence.
    """
    return after_S[_newest_S(batch)].where(batch.truncated_E, 0.0)


def _newest_S(batch: Batch) -> Tensor:
    """bool[S] the last segment of each episode."""
    return _ends(batch.tokens.episode_N[_ends(batch.sequence_N)])


def _ends(ids: Tensor) -> Tensor:
    """Where an ascending column has a value for the last time."""
    return torch.cat([ids[1:] != ids[:-1], torch.ones(min(1, len(ids)), dtype=torch.bool)])


def shaped(batch: Batch, config: TrainConfig) -> ActionTokens:
    """The batch's tokens with penalties in their rewards: first for length, then for being cut short.

    Raises:
        ConfigError: a penalty's flags contradict each other.
    """
    tokens = batch.tokens
    if config.overlong_buffer_len is not None:
        penalty_E = overlong_penalty(
            sampled_lengths(batch, config),
            max_tokens=config.max_new_tokens or config.max_len,
            buffer_tokens=config.overlong_buffer_len,
            factor=config.overlong_penalty_factor,
        )
        tokens = add_at_the_end(tokens, penalty_E)
    if config.stop_properly_penalty_coef is not None:
        rewards_N = truncated_rewards(tokens, batch.truncated_E, config.stop_properly_penalty_coef)
        tokens = replace(tokens, rewards_N=rewards_N)
    return tokens


def advantages(
    batch: Batch,
    config: TrainConfig,
    *,
    logprobs_N: Tensor | None = None,
    ref_logprobs_N: Tensor | None = None,
    values_N: Tensor | None = None,
    bootstrap_E: Tensor | None = None,
) -> Advantages:
    """Advantages and returns of all action tokens, float32[N] each.

    Args:
        batch: the train step's.
        config: the flags.
        logprobs_N: of the policy before the step; with those of the reference, for a penalty in the reward.
        ref_logprobs_N: of the reference.
        values_N: of the critic, for gae.
        bootstrap_E: what the critic says of the state in which an episode was cut short; 0 for the others.
    """
    kl_N = None
    if logprobs_N is not None and ref_logprobs_N is not None and kl_in_reward(config):
        kl_N = kl_estimate(logprobs_N, ref_logprobs_N, config.kl_estimator)
    return estimate_advantages(
        shaped(batch, config), advantage_options(config), kl_N=kl_N, values_N=values_N, bootstrap_E=bootstrap_E
    )
