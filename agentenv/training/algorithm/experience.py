"""Apply the flags to a batch: shaped rewards, advantages, and options of losses and corrections.

Shapes: N action tokens of a batch, E episodes, S sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentenv.training.algorithm.advantages import ActionTokens, AdvantageOptions, Advantages, add_at_the_end, ends_of
from agentenv.training.algorithm.advantages import estimate as estimate_advantages
from agentenv.training.algorithm.batch import Batch
from agentenv.training.algorithm.corrections import CorrectionOptions
from agentenv.training.algorithm.losses import Aggregation, LossOptions, kl_estimate

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig


def kl_in_reward(config: TrainConfig) -> bool:
    """Return True if the KL divergence from the reference is a penalty in the reward."""
    return config.init_kl_coef > 0 and not config.use_kl_loss


def correction_options(config: TrainConfig) -> CorrectionOptions:
    """Return the options for --is_correction and its threshold."""
    low, high = config.is_correction_threshold
    if config.is_correction == "tis":
        return CorrectionOptions("token", "clip", low=low, high=high)
    if config.is_correction == "icepop":
        return CorrectionOptions("token", "mask", low=low, high=high)
    if config.is_correction == "seq-mask-tis":
        return CorrectionOptions("sequence", "mask", low=low, high=high)
    return CorrectionOptions()


def loss_options(config: TrainConfig) -> LossOptions:
    """Return the options of the policy loss."""
    low, high = config.clip_range
    return LossOptions(
        config.policy_loss_type,
        clip_low=low,
        clip_high=high,
        dual_clip=config.dual_clip,
        correction=correction_options(config),
        kl_coef=config.init_kl_coef if config.use_kl_loss else 0.0,
        kl_estimator=config.kl_estimator,
        kl_unbiased_gradient=config.use_kl_loss,  # the plain gradient of k1 is 0 on average
        entropy_coef=config.entropy_loss_coef or 0.0,
    )


def aggregation(config: TrainConfig) -> tuple[Aggregation, int]:
    """Return the aggregation of token losses, and the largest number of action tokens in an episode.

    GSPO always uses the mean over samples, because its ratio belongs to a whole sequence.
    """
    mode: Aggregation = "seq-mean-token-mean" if config.policy_loss_type == "gspo" else config.loss_agg_mode
    return mode, config.max_length


def advantage_options(config: TrainConfig) -> AdvantageOptions:
    """Return the options of advantages. With credit per turn, γ and λ apply per turn, otherwise per token."""
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
    """Return int64[E], the lengths for --overlong_buffer_len: the longest turn with --max_tokens, else the episode.

    Only sampled tokens count, not prompts and observations.
    """
    tokens = batch.tokens
    if config.max_tokens is None:
        return torch.bincount(tokens.episode_N, minlength=len(tokens.group_E))
    ends_X = tokens.turn_ends_N.nonzero()[:, 0]
    lengths_X = ends_X.diff(prepend=torch.tensor([-1]))
    longest_E = torch.zeros(len(tokens.group_E), dtype=torch.int64)
    return longest_E.scatter_reduce(0, tokens.episode_N[ends_X], lengths_X, "amax")


def bootstrap(batch: Batch, after_S: Tensor) -> Tensor:
    """Return [E], the value of the state in which an episode was truncated; 0 for other episodes.

    `after_S` is the critic's value after the last action of each sequence.
    """
    is_last_S = ends_of(batch.tokens.episode_N[ends_of(batch.sequence_N)])  # the last segment of each episode
    return after_S[is_last_S].where(batch.truncated_E, 0.0)


def overlong_penalty(num_tokens_E: Tensor, *, limit_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """Return float64[E] in [-factor, 0], linearly falling over the last `buffer_tokens` before `limit_tokens`.

    `num_tokens_E` counts sampled tokens only, not observations.
    The buffer is not longer than `limit_tokens`.
    Source: soft overlong punishment of DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    over_E = num_tokens_E.double() - (limit_tokens - buffer_tokens)
    return -over_E.clamp(0, buffer_tokens) / buffer_tokens * factor


def truncated_rewards(tokens: ActionTokens, cut_E: Tensor, coef: float) -> Tensor:
    """Return float64[N], rewards in which R of an episode whose last action was cut becomes coef·R, or a negative coef.

    Each turn's reward is scaled on its own, so credit per turn stays correct. A negative coefficient replaces all
    rewards and is paid at the end. Source: ProRL's "stop properly" penalty, as in OpenRLHF.
    """
    cut_N, rewards_N = cut_E.bool()[tokens.episode_N], tokens.rewards_N.double()
    instead_N = coef * rewards_N if coef >= 0 else coef * tokens.episode_ends_N
    return torch.where(cut_N, instead_N, rewards_N)


def shape_rewards(batch: Batch, config: TrainConfig) -> ActionTokens:
    """Return the batch's tokens with penalties in their rewards: first for length, then for truncation."""
    tokens = batch.tokens
    if config.overlong_buffer_len is not None:
        penalty_E = overlong_penalty(
            sampled_lengths(batch, config),
            limit_tokens=config.max_tokens or config.max_length,
            buffer_tokens=config.overlong_buffer_len,
            factor=config.overlong_penalty_factor,
        )
        tokens = add_at_the_end(tokens, penalty_E)
    if config.stop_properly_penalty_coef is not None:
        rewards_N = truncated_rewards(tokens, batch.cut_E, config.stop_properly_penalty_coef)
        tokens = replace(tokens, rewards_N=rewards_N)
    return tokens


def reward_numbers(batch: Batch, config: TrainConfig) -> dict[str, float]:
    """Return mean and deviation of the episodes' rewards after penalties, and the share of groups with equal ones.

    Empty without penalties: then they are those of the rollout.
    """
    tokens = shape_rewards(batch, config)
    if tokens is batch.tokens or not batch.episode_ids:
        return {}
    rewards_E = torch.zeros(len(tokens.group_E), dtype=torch.float64).index_add(0, tokens.episode_N, tokens.rewards_N)
    groups = [rewards_E[tokens.group_E == group] for group in torch.unique(tokens.group_E)]
    shares = [float(rewards_e.min() == rewards_e.max()) for rewards_e in groups if len(rewards_e) > 1]
    numbers = {"reward": float(rewards_E.mean()), "reward_std": float(rewards_E.std(unbiased=False))}
    numbers |= {"reward_std": 0.0} if rewards_E.min() == rewards_E.max() else {}  # exactly
    return numbers | ({"zero_spread_share": sum(shares) / len(shares)} if shares else {})


def advantages(
    batch: Batch,
    config: TrainConfig,
    *,
    logprobs_N: Tensor | None = None,
    ref_logprobs_N: Tensor | None = None,
    values_N: Tensor | None = None,
    bootstrap_E: Tensor | None = None,
) -> Advantages:
    """Return advantages and returns of all action tokens, float32[N] each.

    Args:
        batch: the batch of the train step.
        config: the flags.
        logprobs_N: log-probabilities of the policy before the step, for a KL penalty in the reward.
        ref_logprobs_N: log-probabilities of the reference.
        values_N: values of the critic, for gae.
        bootstrap_E: value of the state in which an episode was truncated; 0 for other episodes.
    """
    kl_N = None
    if logprobs_N is not None and ref_logprobs_N is not None and kl_in_reward(config):
        kl_N = kl_estimate(logprobs_N, ref_logprobs_N, config.kl_estimator).masked_fill(batch.forced_N, 0.0)
    return estimate_advantages(
        shape_rewards(batch, config), advantage_options(config), kl_N=kl_N, values_N=values_N, bootstrap_E=bootstrap_E
    )
