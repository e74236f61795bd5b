"""From a batch and the flags to what a train step learns from: shaped rewards, and the advantages of action tokens.

Shapes: N action tokens of a batch, E its episodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentenv.trainer.advantages import ActionTokens, AdvantageOptions, Advantages, add_at_the_end, episode_sums
from agentenv.trainer.advantages import estimate as estimate_advantages
from agentenv.trainer.batch import Batch
from agentenv.trainer.corrections import CorrectionOptions
from agentenv.trainer.losses import Aggregation, LossOptions, kl_estimate
from agentenv.trainer.shaping import overlong_penalty, truncation_penalty

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
        entropy_coef=config.entropy_loss_coef or 0.0,
    )


def aggregation(config: TrainConfig) -> tuple[Aggregation, int]:
    """How the losses of tokens are put together, and the most action tokens that an episode may have."""
    return config.loss_agg_mode, config.max_len


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


def room_left(batch: Batch, config: TrainConfig) -> Tensor:
    """int64[E] tokens that an episode could still have sampled: of --max_len, and of all turns' --max_new_tokens.

    What the environment said takes room but is no one's fault: it is not counted as sampled.
    """
    num_episodes = len(batch.tokens.group_E)
    lengths_S = torch.tensor([len(ids) for ids in batch.sequences], dtype=torch.int64)
    left_E = config.max_len - lengths_S[_newest_S(batch)]  # the newest segment is what runs out of room
    if config.max_new_tokens is not None:
        sampled_E = torch.bincount(batch.tokens.episode_N, minlength=num_episodes)
        left_E = torch.minimum(left_E, config.max_new_tokens * config.max_steps - sampled_E)
    return left_E.clamp(min=0)


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
            config.max_len - room_left(batch, config),
            max_tokens=config.max_len,
            buffer_tokens=config.overlong_buffer_len,
            factor=config.overlong_penalty_factor,
        )
        tokens = add_at_the_end(tokens, penalty_E)
    if config.stop_properly_penalty_coef is not None:
        rewards_E = episode_sums(tokens.rewards_N, tokens)
        extra_E = truncation_penalty(rewards_E, batch.truncated_E, config.stop_properly_penalty_coef)
        tokens = add_at_the_end(tokens, extra_E)
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
