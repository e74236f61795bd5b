"""Figures of rewards, and what takes the place of a missing one; rows 12 and 20 of the RM-Gallery table."""

import pytest

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.groups.statistics import (
    COLUMNS,
    InvalidPolicy,
    NumberSummary,
    apply_policy,
    statistics,
)
from agentenv.rewards.types import RewardResult, Status

RESULTS = [
    RewardResult(1.0, 1.0, components={"format": 1.0, "judge": 0.5}),
    RewardResult(3.0, 0.0, components={"format": 0.0, "judge": None}),
    RewardResult(None, status=Status.INFRA, components={"format": 100.0, "judge": None}),
    RewardResult(5.0, components={"format": 1.0, "judge": 0.25}),
    RewardResult(None, status=Status.LABEL),
]
GROUPS = ["a", "a", "a", "b", "c"]


def test_a_batch_without_its_invalid_responses__row_12():
    batch = statistics(RESULTS, GROUPS).batch
    assert batch["reward"] == NumberSummary(3, 3.0, pytest.approx((8 / 3) ** 0.5), 1.0, 5.0)
    assert batch["score"] == NumberSummary(2, 0.5, 0.5, 0.0, 1.0)
    assert batch["components/format"] == NumberSummary(3, pytest.approx(2 / 3), pytest.approx((2 / 9) ** 0.5), 0.0, 1.0)
    assert batch["components/judge"] == NumberSummary(2, 0.375, 0.125, 0.25, 0.5)


def test_groups__row_12():
    groups = statistics(RESULTS, GROUPS).groups
    assert list(groups) == ["a", "b", "c"]
    assert groups["a"]["reward"] == NumberSummary(2, 2.0, 1.0, 1.0, 3.0)
    assert groups["b"]["components/judge"] == NumberSummary(1, 0.25, 0.0, 0.25, 0.25)
    assert groups["c"]["reward"] == groups["c"]["components/format"] == NumberSummary(0)


def test_every_response_has_the_figures_of_its_group__row_12():
    """The seed reads `reward_std`, which nothing there writes."""
    columns = statistics(RESULTS, GROUPS).columns
    assert tuple(columns) == COLUMNS == ("reward_mean", "reward_std", "reward_min", "reward_max")
    assert columns["reward_mean"] == [2.0, 2.0, 2.0, 5.0, None]
    assert columns["reward_std"] == [1.0, 1.0, 1.0, 0.0, None]


def test_nothing_at_all():
    found = statistics([], [])
    assert (found.batch["reward"], found.groups, found.columns["reward_mean"]) == (NumberSummary(0), {}, [])
    assert found.metrics() == {"rewards/reward/n_valid": 0.0, "rewards/score/n_valid": 0.0, "rewards/num_invalid": 0.0}


def test_a_group_key_is_needed_for_each():
    with pytest.raises(ConfigError, match="each of 5 responses, got 1"):
        statistics(RESULTS, "a")
    with pytest.raises(ConfigError, match="each of 5 responses, got 1"):
        apply_policy(RESULTS, "a", "keep")


# --- missing rewards --------------------------------------------------------------------------------------------------

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
