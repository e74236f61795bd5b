"""Advantages against numbers worked by hand, and what must hold of any batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import ConfigError
from agentenv.training.algorithm.advantages import (
    ActionTokens,
    AdvantageOptions,
    add_at_the_end,
    decays,
    episode_sums,
    estimate,
    gae,
    returns_to_go,
    whiten,
)


def tokens(*episodes, groups=None):
    """Episodes as lists of turns (number of tokens, reward); all in one group unless said."""
    rows = [
        (e, t, reward if i == num - 1 else 0.0)
        for e, turns in enumerate(episodes)
        for t, (num, reward) in enumerate(turns)
        for i in range(num)
    ]
    episode, turn, rewards = zip(*rows, strict=True)
    groups = [0] * len(episodes) if groups is None else groups
    return ActionTokens(
        torch.tensor(episode), torch.tensor(turn), torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    )


def advantages(batch, estimator, *, kl=None, values=None, bootstrap=None, **options):
    kl_N, values_N, bootstrap_E = (None if x is None else torch.tensor(x) for x in (kl, values, bootstrap))
    found = estimate(
        batch, AdvantageOptions(estimator, **options), kl_N=kl_N, values_N=values_N, bootstrap_E=bootstrap_E
    )
    assert found.advantages_N.dtype == torch.float32
    return found.advantages_N.tolist()


RETRY = tokens([(2, 0.0), (1, 1.0)], [(3, 1.0)])
"""One episode that failed and then solved it in a second turn, one that solved it at once."""


# --- credit per turn ------------------------------------------------------------------------------------------------


def test_a_turns_tokens_get_its_reward_and_the_later_ones_discounted_per_turn():
    batch = tokens([(2, 1.0), (3, 10.0), (1, 100.0)])
    found = advantages(batch, "reinforce", gamma=0.5, scale=False)
    mean = (2 * 31 + 3 * 60 + 100) / 6  # turns are worth 1 + 10/2 + 100/4, 10 + 100/2 and 100
    assert found == pytest.approx([31 - mean] * 2 + [60 - mean] * 3 + [100 - mean])


def test_an_earlier_reward_reaches_no_later_turn_but_does_in_the_summed_way():
    batch = tokens([(1, 5.0), (1, 0.0)])
    assert advantages(batch, "reinforce", scale=False) == [2.5, -2.5]
    assert advantages(batch, "reinforce", scale=False, credit="episode") == [0.0, 0.0]


def test_discount_per_token_counts_action_tokens_only():
    found = returns_to_go(RETRY.rewards_N, decays(RETRY, 0.5, "token")).tolist()
    assert found == [0.25, 0.5, 1.0, 0.25, 0.5, 1.0]


def test_a_discount_per_turn_is_the_same_for_all_tokens_of_a_turn():
    assert returns_to_go(RETRY.rewards_N, decays(RETRY, 0.5, "turn")).tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_group_estimators_compare_each_turn_with_the_same_turn_of_the_others():
    """Three episodes: turn 0 is worth γ·1, 1 and γ·0; turn 1 is reached by two of them and worth 1 and 0."""
    batch = tokens([(2, 0.0), (1, 1.0)], [(1, 1.0)], [(1, 0.0), (2, 0.0)])
    found = advantages(batch, "dr_grpo", gamma=0.5)
    assert found == pytest.approx([0.0, 0.0, 0.5, 0.5, -0.5, -0.5, -0.5])
    rloo = advantages(batch, "rloo", gamma=0.5)
    assert rloo == pytest.approx([0.0, 0.0, 1.0, 0.75, -0.75, -1.0, -1.0])


def test_a_turn_that_one_member_alone_reached_has_nothing_to_be_compared_with():
    assert advantages(RETRY, "rloo", gamma=0.5) == [-0.5, -0.5, 0.0, 0.5, 0.5, 0.5]


# --- credit per episode: the field's estimators ----------------------------------------------------------------------

FOUR = tokens([(1, 1.0)], [(2, 2.0)], [(1, 3.0)], [(1, 6.0)])


@pytest.mark.parametrize(
    ("estimator", "by_episode"),
    [
        ("rloo", [1 - 11 / 3, 2 - 10 / 3, 3 - 9 / 3, 6 - 6 / 3]),
        ("dr_grpo", [-2.0, -1.0, 0.0, 3.0]),
        ("flash_reinforce", [-2.0, -1.0, 0.0, 3.0]),
        ("group_norm", [x / math.sqrt(14 / 3) for x in (-2.0, -1.0, 0.0, 3.0)]),
    ],
)
def test_group_estimators_are_their_formulas(estimator, by_episode):
    first, second, third, fourth = by_episode
    expected = pytest.approx([first, second, second, third, fourth])
    assert advantages(FOUR, estimator, credit="episode") == expected
    assert advantages(FOUR, estimator) == expected  # of one turn each: the two credits are the same


def test_reinforce_baseline_takes_the_groups_mean_off_and_whitens_over_tokens():
    raw = [-2.0, -1.0, -1.0, 0.0, 3.0]
    mean = sum(raw) / 5
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 5)
    assert advantages(FOUR, "reinforce_baseline", credit="episode") == pytest.approx([(x - mean) / std for x in raw])


def test_reinforce_takes_no_group_into_account():
    one, two = (tokens([(1, 1.0)], [(1, 3.0)], groups=groups) for groups in ([0, 0], [0, 1]))
    assert advantages(one, "reinforce") == advantages(two, "reinforce") == pytest.approx([-1.0, 1.0])


def test_groups_do_not_see_one_another_except_in_flash_reinforce():
    batch = tokens([(1, 0.0)], [(1, 2.0)], [(1, 10.0)], [(1, 12.0)], groups=[0, 0, 7, 7])
    assert advantages(batch, "dr_grpo") == [-1.0, 1.0, -1.0, 1.0]
    assert advantages(batch, "flash_reinforce") == [-6.0, -4.0, 4.0, 6.0]


@given(
    st.sampled_from(["reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce", "reinforce"]),
    st.sampled_from(["episode", "turn"]), st.floats(-1e30, 1e30), st.integers(1, 9),
)  # fmt: skip
@settings(deadline=None)
def test_equal_rewards_and_a_reward_alone_give_exactly_zero(estimator, credit, reward, num):
    """Not rounding errors divided by a deviation of their own size, and not NaN."""
    assert advantages(tokens(*[[(2, reward)]] * num), estimator, credit=credit) == [0.0] * 2 * num


def test_sums_that_differ_by_rounding_alone_give_almost_zero():
    batch = tokens([(1, 0.1), (1, 0.2)], [(2, 0.3)])
    assert advantages(batch, "group_norm", credit="episode") == pytest.approx([0.0] * 4, abs=1e-6)


# --- KL in the reward, clipping --------------------------------------------------------------------------------------


def test_the_kl_penalty_of_a_token_reaches_it_and_the_tokens_before():
    batch = tokens([(3, 1.0)], [(1, 0.0)])
    found = advantages(batch, "dr_grpo", kl=[1.0, 2.0, 3.0, 4.0], kl_coef=0.1)
    assert found == pytest.approx([0.5 - 0.6, 0.5 - 0.5, 0.5 - 0.3, -0.5 - 0.4])


def test_the_kl_penalty_is_discounted_as_rewards_are_in_reinforce():
    found = advantages(
        tokens([(3, 1.0)]), "reinforce", kl=[1.0, 2.0, 4.0], kl_coef=0.5, gamma=0.5, decay_per="token", scale=False
    )
    returns = [-0.5 - 0.75, -1.0 - 0.5, -1.0]  # the last: -2 + 1; then -1 - 0.5; then -0.5 - 0.75
    assert found == pytest.approx([x - sum(returns) / 3 for x in returns])


def test_rewards_are_clipped_after_the_baseline_is_taken_off():
    assert advantages(FOUR, "dr_grpo", reward_clip=(-1.5, 2.0)) == [-1.5, -1.0, -1.0, 0.0, 2.0]


def test_the_penalty_is_not_clipped():
    assert advantages(tokens([(1, 9.0)]), "dr_grpo", kl=[50.0], kl_coef=1.0, reward_clip=(-1, 1)) == [-50.0]


# --- values ----------------------------------------------------------------------------------------------------------


def test_gae_worked_by_hand_across_a_gap():
    """r = 0, 0 | 1 with V = .5, .4, .3, γ .9, λ .8 per token: the observation between the turns is not there."""
    batch = tokens([(2, 0.0), (1, 1.0)])
    deltas = [0.9 * 0.4 - 0.5, 0.9 * 0.3 - 0.4, 1 - 0.3]
    third = deltas[2]
    second = deltas[1] + 0.72 * third
    first = deltas[0] + 0.72 * second
    rewards, values = batch.rewards_N, torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64)
    found, returns = gae(rewards, values, decays(batch, 0.9, "token"), decays(batch, 0.8, "token"))
    assert found.tolist() == pytest.approx([first, second, third])
    assert returns.tolist() == pytest.approx([first + 0.5, second + 0.4, third + 0.3])


def test_gae_in_the_summed_way_pays_at_the_end():
    batch = tokens([(1, 1.0), (1, 2.0)])
    options = AdvantageOptions("gae", credit="episode", gamma=0.5, lam=0.0)
    returns = estimate(batch, options, values_N=torch.tensor([1.0, 4.0])).returns_N
    assert returns.tolist() == [0.5 * 4.0, 3.0]  # λ 0: one step ahead


def test_a_truncated_episode_continues_in_the_value_of_its_last_state():
    batch = tokens([(1, 1.0)], [(1, 1.0)])
    options = AdvantageOptions("gae", gamma=0.5)
    found = estimate(batch, options, values_N=torch.zeros(2), bootstrap_E=torch.tensor([0.0, 8.0]))
    assert found.returns_N.tolist() == [1.0, 5.0]


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_whitening_has_mean_zero_and_variance_one():
    white = whiten(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64))
    assert (white.mean().item(), white.square().mean().item()) == pytest.approx((0.0, 1.0))
    assert white.tolist() == pytest.approx([-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), 3 / math.sqrt(14 / 3)])


def test_something_added_at_the_end_is_on_the_last_token():
    more = add_at_the_end(RETRY, torch.tensor([-0.5, 0.25]))
    assert more.rewards_N.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, 1.25]
    assert episode_sums(more.rewards_N, more).tolist() == [0.5, 1.25]


def test_gae_needs_values():
    with pytest.raises(ConfigError, match="value head"):
        advantages(RETRY, "gae")
