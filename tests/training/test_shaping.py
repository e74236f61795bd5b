"""Penalties for length and dynamic filtering, against numbers worked by hand."""

import pytest
import torch

from agentenv.errors import ConfigError
from agentenv.training.algorithm.advantages import ActionTokens
from agentenv.training.algorithm.shaping import filter_groups, overlong_penalty, truncated_rewards


def two_episodes():
    """Of two turns of a token each, which earn 2 and 4."""
    rewards_N = torch.tensor([2.0, 4.0, 2.0, 4.0], dtype=torch.float64)
    return ActionTokens(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), rewards_N, torch.tensor([0, 0]))


def test_the_overlong_penalty_falls_linearly_over_the_buffer():
    found = overlong_penalty(torch.tensor([0, 80, 85, 100, 130]), limit_tokens=100, buffer_tokens=20, factor=2.0)
    assert found.tolist() == [0.0, 0.0, -0.5, -2.0, -2.0]


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ConfigError, match="overlong_buffer_len"):
        overlong_penalty(torch.tensor([1]), limit_tokens=100, buffer_tokens=buffer)


@pytest.mark.parametrize(("coef", "expected"), [(0.25, [0.5, 1.0]), (0.0, [0.0, 0.0]), (-0.5, [0.0, -0.5])])
def test_a_truncated_episodes_rewards_are_scaled_or_replaced(coef, expected):
    assert truncated_rewards(two_episodes(), torch.tensor([False, True]), coef).tolist() == [2.0, 4.0, *expected]


def test_a_penalty_that_would_be_a_prize_is_refused():
    with pytest.raises(ConfigError, match="stop_properly"):
        truncated_rewards(two_episodes(), torch.tensor([False, True]), 1.5)


def test_groups_on_the_edge_of_the_range_or_without_a_score_are_rejected_and_counted():
    groups = [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [None, None], [None, 0.5], [], [0.0, None]]
    found = filter_groups(groups, low=0.0, high=1.0)
    assert (found.kept, found.num_low, found.num_high, found.num_unscored) == ((1, 4), 2, 1, 2)
    assert found.rejection_rate == 5 / 7


def test_a_score_of_zero_is_a_score():
    assert filter_groups([[0.0, 1.0, 1.0]], low=0.7, high=1.0).num_low == 1


def test_no_group_has_no_rejection():
    assert filter_groups([], low=0.0, high=1.0).rejection_rate == 0.0


def test_an_empty_range_is_refused():
    with pytest.raises(ConfigError, match="dynamic_filtering_reward_range"):
        filter_groups([], low=1.0, high=1.0)
