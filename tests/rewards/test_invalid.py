"""What takes the place of a missing reward; row 20 of the RM-Gallery table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.groups.statistics import statistics
from agentenv.rewards.invalid import InvalidPolicy, apply_policy
from agentenv.rewards.types import RewardResult, Status

NONE = RewardResult.failed("HTTP 503")


def results(*rewards):
    return [NONE if reward is None else RewardResult(reward) for reward in rewards]


@pytest.mark.parametrize(
    ("policy", "rewards", "mask"),
    [
        ("keep", [1.0, -999.0, 4.0, -999.0, -999.0], [True] * 5),
        ("group_mean", [1.0, 2.5, 4.0, 0.0, 0.0], [True, True, True, False, False]),
        ("zero", [1.0, 0.0, 4.0, 0.0, 0.0], [True] * 5),
        ("mask", [1.0, 0.0, 4.0, 0.0, 0.0], [True, False, True, False, False]),
    ],
)
def test_every_policy__row_20(policy, rewards, mask):
    applied = apply_policy(results(1.0, None, 4.0, None, None), ["a", "a", "a", "b", "b"], policy)
    assert (applied.rewards, applied.mask, applied.num_invalid) == (rewards, mask, 3)


def test_raising_says_how_many_and_why__row_20():
    bad = [RewardResult(1.0), NONE, NONE, RewardResult.failed("no label", Status.LABEL)]
    with pytest.raises(InfraError) as raised:
        apply_policy(bad, "aabb", InvalidPolicy.RAISE)
    assert "each of 4 responses, got none for 3 (2 infra, 1 label; the first: HTTP 503)" in str(raised.value)


@pytest.mark.parametrize("policy", ["drop", "", None, 3])
def test_an_unknown_policy_is_named_with_those_that_are_known(policy):
    with pytest.raises(ConfigError, match="keep, group_mean, zero, mask, raise"):
        apply_policy(results(1.0), "a", policy)


def test_a_group_key_is_needed_for_each():
    with pytest.raises(ConfigError, match="each of 2 responses, got 1"):
        apply_policy(results(1.0, 2.0), "a", "keep")


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.floats(-10, 10)), max_size=20))
def test_the_groups_mean_moves_no_groups_mean(rows):
    groups, rewards = [key for key, _ in rows], [reward for _, reward in rows]
    graded = results(*rewards)
    applied = apply_policy(graded, groups, "group_mean")
    means = statistics(graded, groups).groups
    for key in set(groups):
        filled = [reward for reward, group in zip(applied.rewards, groups, strict=True) if group == key]
        mean = means[key]["reward"].mean
        assert sum(filled) / len(filled) == pytest.approx(0.0 if mean is None else mean, abs=1e-9)
