"""From flags and a batch to what is learned from: every flag reaches its option, penalties reach the right reward."""

import math
from dataclasses import replace

import pytest
import torch

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.training.algorithm import experience
from agentenv.training.algorithm.batch import build
from agentenv.training.algorithm.corrections import CorrectionOptions
from agentenv.training.algorithm.losses import PolicyInputs, policy_loss
from agentenv.training.learner.optimizer import MIN_LR_RATIO, Optimizer, learning_rate_factor
from tests.training.worlds import batch_of, episode, flags


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("off", CorrectionOptions()),
        ("tis", CorrectionOptions("token", "clip", low=0.4, high=3.0)),
        ("icepop", CorrectionOptions("token", "mask", low=0.4, high=3.0)),
        ("seq-mask-tis", CorrectionOptions("sequence", "mask", low=0.4, high=3.0)),
    ],
)
def test_corrections_by_their_names(name, expected):
    config = flags(is_correction=name, is_correction_threshold=(0.4, 3.0))
    assert experience.correction_options(config) == experience.loss_options(config).correction == expected


def test_the_loss_is_what_the_flags_say():
    options = experience.loss_options(
        flags(
            policy_loss_type="gspo", eps_clip_low_high=(0.1, 0.3), dual_clip=4.0, init_kl_coef=0.2, use_kl_loss=True,
            kl_estimator="k2", entropy_loss_coef=0.01,
        )
    )  # fmt: skip
    found = (options.policy_loss_type, options.clip_low, options.clip_high, options.dual_clip, options.kl_coef)
    assert found == ("gspo", 0.1, 0.3, 4.0, 0.2)
    assert (options.kl_estimator, options.entropy_coef) == ("k2", 0.01)
    plain = experience.loss_options(flags(eps_clip=0.25))
    assert (plain.clip_low, plain.clip_high, plain.kl_coef, plain.entropy_coef) == (0.25, 0.25, 0.0, 0.0)


def test_a_kl_penalty_is_in_the_reward_or_in_the_loss_and_never_in_both():
    reward, loss = flags(init_kl_coef=0.2), flags(init_kl_coef=0.2, use_kl_loss=True)
    assert (experience.advantage_options(reward).kl_coef, experience.loss_options(reward).kl_coef) == (0.2, 0.0)
    assert (experience.advantage_options(loss).kl_coef, experience.loss_options(loss).kl_coef) == (0.0, 0.2)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("old", [[0.5, 0.3, 0.2], [0.3, 0.3, 0.4]])
def test_the_loss_term_has_the_gradient_of_the_divergence(estimator, old):
    """All of a toy policy's three tokens, each as often as the policy before the step samples it."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().requires_grad_()
    ref, old = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor(old)
    inputs = PolicyInputs(
        logits.log_softmax(0), old.log(), torch.zeros(3), old, torch.arange(3), ref_logprobs_n=ref
    )  # fmt: skip
    options = experience.loss_options(flags(init_kl_coef=0.5, use_kl_loss=True, kl_estimator=estimator))
    (found,) = torch.autograd.grad(policy_loss(inputs, options)[0], logits)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(0.5 * (logprobs.exp() * (logprobs - ref)).sum(), logits)
    torch.testing.assert_close(found, exact)
    assert exact.abs().max() > 0.1


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gspo_is_averaged_per_sample_regardless_of_the_mode(mode):
    assert experience.aggregation(flags(loss_agg_mode=mode)) == (mode, 2048)
    found, _ = experience.aggregation(flags(loss_agg_mode=mode, policy_loss_type="gspo"))
    assert found == "seq-mean-token-mean"


def test_advantages_are_estimated_as_the_flags_say():
    options = experience.advantage_options(
        flags(
            advantage_estimator="gae", gamma=0.9, lambd=0.8, no_advantage_std_norm=True, reward_clip_range=(-2.0, 3.0)
        )
    )
    assert (options.estimator, options.gamma, options.lam, options.scale) == ("gae", 0.9, 0.8, False)
    assert (options.reward_clip, options.credit, options.decay_per) == ((-2.0, 3.0), "turn", "turn")
    summed = experience.advantage_options(flags(credit="episode"))
    assert (summed.credit, summed.decay_per, summed.scale) == ("episode", "token", True)


def test_the_penalty_in_the_reward_is_the_divergence_times_its_weight():
    batch = batch_of([[(2, 1.0)]])
    config = flags(advantage_estimator="dr_grpo", init_kl_coef=0.5, credit="episode")
    logprobs_N, ref_N = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    found = experience.advantages(batch, config, logprobs_N=logprobs_N, ref_logprobs_N=ref_N)
    assert found.advantages_N.tolist() == [-0.5 * (0.5 - 1.0), -0.5 * -1.0]
    in_loss = flags(advantage_estimator="dr_grpo", init_kl_coef=0.5, use_kl_loss=True)
    again = experience.advantages(batch, in_loss, logprobs_N=logprobs_N, ref_logprobs_N=ref_N)
    assert again.advantages_N.tolist() == [0.0, 0.0]


# --- penalties ----------


def rewards_of(batch, **changes):
    return experience.shape_rewards(batch, flags(**changes)).rewards_N.tolist()


def penalty_of(*episodes, **changes):
    """What the flags take off each episode's reward."""
    batch = build(episodes)
    lost_N = experience.shape_rewards(batch, flags(**changes)).rewards_N - batch.tokens.rewards_N
    assert not lost_N[~batch.tokens.episode_ends_N].any()
    return pytest.approx(lost_N[batch.tokens.episode_ends_N].tolist())


def test_samples_that_come_near_their_bound_are_penalised():
    options = {"max_length": 20, "max_tokens": 10, "overlong_buffer_len": 4, "overlong_penalty_factor": 2.0}
    made = [episode([(length, 1.0)]) for length in (10, 9, 6, 1)]
    assert penalty_of(*made, **options) == [-2.0, -2.0 * 3 / 4, 0.0, 0.0]


@pytest.mark.parametrize("turns", [[(10, 0.0)], [(10, 0.0), (1, 1.0)], [(1, 0.0), (10, 1.0)]])
def test_a_turn_that_was_cut_at_its_limit_is_overlong_wherever_it_stands(turns):
    """And however many turns an episode may have."""
    options = {"max_length": 200, "max_tokens": 10, "max_turns": 16, "overlong_buffer_len": 4}
    assert penalty_of(episode(turns), **options) == [-1.0]


def test_turns_below_their_limit_are_not_overlong_together():
    options = {"max_length": 40, "max_tokens": 10, "overlong_buffer_len": 4}
    assert penalty_of(episode([(6, 0.0), (5, 0.0), (6, 1.0)]), **options) == [0.0]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 10}])
def test_what_the_policy_did_not_say_is_not_held_against_it(limit):
    """The same tokens after prompts of all lengths, and between observations."""
    made = [episode([(9, 1.0)], prompt=prompt) for prompt in (1, 3, 11)]
    one, *others = (penalty_of(each, **limit, max_length=12, overlong_buffer_len=6).expected for each in made)
    assert one[0] < 0
    assert others == [one, one]
    two = [talked([4, 5], observation) for observation in (1, 7, 30)]
    assert penalty_of(*two, max_length=12, overlong_buffer_len=6) == [-0.5] * 3


def talked(turns, observation):
    made = Trajectory(Task("?"), 100)
    for length in turns:
        made.append_observation([3] * observation)
        made.append_turn(Completion((5,) * length, logprobs=(-1.0,) * length), "a")
        made.set_result(StepResult(reward=0.0))
    made.finish(StopReason.TERMINATED)
    return made


def test_without_a_limit_of_turns_all_segments_of_an_episode_count():
    found = experience.shape_rewards(segmented(), flags(max_length=12, overlong_buffer_len=4)).rewards_N
    assert found[-1].item() == 1.0 - 3 / 4  # 8 + 3 tokens


def segmented():
    made = Trajectory(Task("?"), 100)
    made.append_observation([3] * 4)
    made.append_turn(Completion((5,) * 8, logprobs=(-1.0,) * 8), "a")
    made.set_result(StepResult(reward=0.0))
    made.open_segment([6, 7])
    made.append_turn(Completion((5,) * 3, logprobs=(-1.0,) * 3), "a")
    made.set_result(StepResult(reward=1.0))
    made.finish(StopReason.TERMINATED)
    return build([made])


def cut(trajectory):
    """The token limit cut its last action, however the episode ended: what OpenRLHF penalizes."""
    trajectory.turns[-1].finish_reason = "length"
    return trajectory


def test_truncated_samples_keep_a_share_of_their_reward_after_other_penalties():
    batch = build([cut(episode([(9, 1.0)])), episode([(9, 1.0)], stop=StopReason.MAX_LENGTH)])
    options = {"max_length": 11, "overlong_buffer_len": 4}  # 9 of 11 tokens: half of the penalty
    assert rewards_of(batch, **options)[8::9] == pytest.approx([0.5, 0.5])
    assert rewards_of(batch, **options, stop_properly_penalty_coef=0.4)[8::9] == pytest.approx([0.2, 0.5])
    assert rewards_of(batch, **options, stop_properly_penalty_coef=-1.0)[8::9] == pytest.approx([-1.0, 0.5])


@pytest.mark.parametrize(
    ("coef", "expected"), [(1.0, [1.0, 0.0, 2.0]), (0.5, [0.5, 0.0, 1.0]), (0.0, [0.0] * 3), (-0.5, [0.0, 0.0, -0.5])]
)
def test_a_truncated_samples_turns_keep_their_share_each_and_none_is_blamed_for_the_others(coef, expected):
    """Else the last turn would pay for what all of them earned."""
    turns = [(1, 1.0), (1, 0.0), (1, 2.0)]
    batch = build([cut(episode(turns)), episode(turns, stop=StopReason.MAX_TURNS)])
    assert rewards_of(batch, stop_properly_penalty_coef=coef) == [*expected, 1.0, 0.0, 2.0]


def test_rewards_after_penalties_have_numbers_and_none_without():
    batch = build([cut(episode([(1, 1.0)], group="a")), cut(episode([(2, 0.5)], group="a")), episode([(1, -1.0)])])
    assert experience.reward_numbers(batch, flags()) == {}
    found = experience.reward_numbers(batch, flags(stop_properly_penalty_coef=-1.0))
    assert found == {"reward": -1.0, "reward_std": 0.0, "zero_spread_share": 1.0}
    scaled = experience.reward_numbers(batch, flags(stop_properly_penalty_coef=0.0))
    assert scaled == pytest.approx({"reward": -1 / 3, "reward_std": 2**0.5 / 3, "zero_spread_share": 1.0})
    assert experience.reward_numbers(build([]), flags(stop_properly_penalty_coef=0.0)) == {}


def test_penalties_of_nothing_are_nothing():
    options = {"max_length": 14, "overlong_buffer_len": 3, "max_tokens": 3, "stop_properly_penalty_coef": 0.4}
    assert rewards_of(build([]), **options) == []


def test_only_what_was_cut_short_is_worth_something_after_its_newest_segment():
    batch = segmented()
    after_S = torch.tensor([3.0, 4.0])
    assert experience.bootstrap(batch, after_S).tolist() == [0.0]
    cut = replace(batch, truncated_E=torch.tensor([True]))
    assert experience.bootstrap(cut, after_S).tolist() == [4.0]


# --- the optimizer ----------


def test_learning_rates_end_where_their_names_say():
    last = {
        name: learning_rate_factor(name, 99, 100) for name in ("constant", "linear", "cosine", "cosine_with_min_lr")
    }
    assert last == pytest.approx({
        "constant": 1.0, "linear": 0.01, "cosine": (1 + math.cos(0.99 * math.pi)) / 2,
        "cosine_with_min_lr": MIN_LR_RATIO + (1 - MIN_LR_RATIO) * (1 + math.cos(0.99 * math.pi)) / 2,
    })  # fmt: skip
    assert learning_rate_factor("cosine_with_min_lr", 500, 100) == pytest.approx(MIN_LR_RATIO)
    assert learning_rate_factor("cosine", 50, 100) == pytest.approx(0.5)
    assert learning_rate_factor("linear", 0, 100) == 1.0


def test_warming_up_rises_to_the_rate_and_begins_above_nothing():
    rates = [learning_rate_factor("constant", step, 10, warmup_ratio=0.3) for step in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_weight_decay_is_for_matrices_only():
    matrix, bias = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = Optimizer([matrix, bias], flags(l2=0.5), peak=0.1)
    optimizer.backward((matrix.sum() + bias.sum()) * 0.0)
    assert optimizer.norm() == 0.0
    assert optimizer.step(0.5) == 0.05
    assert matrix.flatten().tolist() == pytest.approx([0.975] * 4)
    assert bias.tolist() == [1.0, 1.0]


def test_weight_decay_and_betas_that_change_between_two_sessions_hold_from_then_on():
    def made(**changes):
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,))]
        return Optimizer(parameters, flags(**changes), peak=0.1)

    first, second = made(l2=0.1), made(l2=0.5, adam_betas=(0.5, 0.6))
    first.backward(first.parameters[0].sum() + first.parameters[1].sum())
    first.step(1.0)
    second.load_state(first.state())
    found = [(group["weight_decay"], group["betas"]) for group in second._adam.param_groups]
    assert found == [(0.5, (0.5, 0.6)), (0.0, (0.5, 0.6))]
    assert second._adam.state[second.parameters[0]]["step"] == 1, "its moments are those of the state"
