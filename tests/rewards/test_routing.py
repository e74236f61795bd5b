"""Which reward judges a row, and which groups are kept. The defects are ROLL's."""

import pytest

from agentenv.errors import ConfigError, DataError
from agentenv.rewards.grading import grade
from agentenv.rewards.routing import Router, filter_groups, mean_filter, no_filter, std_filter
from agentenv.rewards.types import Response, RewardResult, Status
from tests.rewards.judges.rule_judges import Rewarding

MATH, CODE = Rewarding(1.0, (0.0, 1.0)), Rewarding(-0.5, (-1.0, 0.5))
REWARDS = {"math": MATH, "code": CODE}


def row(tag, key="tag"):
    return Response("x", metadata={key: tag})


@pytest.mark.parametrize(
    "tags", [{"gsm8k": "math", "aime": "math", "mbpp": "code"}, {"math": ["gsm8k", "aime"], "code": ["mbpp"]}]
)
async def test_a_row_goes_to_the_reward_of_its_domain(tags):
    router = Router(REWARDS, tags)
    for tag, reward in {"gsm8k": 1.0, "aime": 1.0, "mbpp": -0.5, "math": 1.0, "code": -0.5}.items():
        assert (await router.grade(row(tag))).reward == reward
    assert router.bounds == (-1.0, 1.0)


@pytest.mark.parametrize("key", ["tag", "domain", "data_source"])
async def test_any_column_may_say_it(key):
    assert (await Router(REWARDS, key=key).grade(row("code", key))).reward == -0.5


@pytest.mark.parametrize("tag", ["ifeval", "", None, 3, ["math"], "Math"])
async def test_an_unknown_tag_is_an_error_that_names_those_that_are_known(tag):
    """ROLL judges it as mathematics."""
    with pytest.raises(DataError, match=r"tag: expected one of code, gsm8k, math, got"):
        await Router(REWARDS, {"gsm8k": "math"}).grade(row(tag))
    assert (await grade(Router(REWARDS), row(tag))).status is Status.LABEL


async def test_a_row_without_a_tag_is_an_error():
    with pytest.raises(DataError, match="got None"):
        await Router(REWARDS).grade(Response("x"))


@pytest.mark.parametrize(
    ("rewards", "tags"),
    [
        ({}, None),
        ({"math": None}, None),
        ({"math": Router}, None),
        (REWARDS, {"math": None}),
        (REWARDS, {"gsm8k": ["math", 5], "math": 3}),
        (REWARDS, {"gsm8k": "maths"}),
        (REWARDS, {"maths": ["gsm8k"]}),
        (REWARDS, {"math": ["x"], "code": ["x"]}),
        (REWARDS, {"code": "math"}),
        (REWARDS, {"code": ["math"]}),
    ],
)
def test_wrong_tables_are_refused(rewards, tags):
    with pytest.raises(ConfigError):
        Router(rewards, tags)


# --- groups ---------------------------------------------------------------------------------------------------------


GROUPS = {
    "low": [-1.0, -1.0],
    "wrong": [0.0, 0.0],
    "mixed": [0.0, 1.0],
    "right": [1.0, 1.0],
    "one": [0.5],
    "dead": [None, None],
}
RESULTS = [
    RewardResult.failed("down") if reward is None else RewardResult(reward)
    for rewards in GROUPS.values()
    for reward in rewards
]
KEYS = [key for key, rewards in GROUPS.items() for _ in rewards]


@pytest.mark.parametrize(
    ("keep", "kept", "dropped"),
    [
        (no_filter, list(GROUPS), {}),
        (mean_filter(), ["wrong", "mixed", "right", "one"], {"low": 1, "invalid": 1}),
        (mean_filter(down=0.0, up=1.0), ["mixed", "one"], {"low": 2, "high": 1, "invalid": 1}),
        (std_filter(), ["mixed"], {"even": 4, "invalid": 1}),
        (std_filter(threshold=0.5), [], {"even": 5, "invalid": 1}),
    ],
)
def test_filters_and_their_counts(keep, kept, dropped):
    """ROLL keeps every list of one item, which is what its callers give it, and counts nothing."""
    found = filter_groups(RESULTS, KEYS, keep)
    assert [key for key, is_kept in found.kept.items() if is_kept] == kept
    assert found.num_dropped == dropped
    metrics = found.metrics()
    assert metrics.pop("rewards/filter/kept") == len(kept)
    assert metrics.pop("rewards/filter/num_groups") == 6.0
    assert metrics == {f"rewards/filter/dropped_{reason}": float(count) for reason, count in dropped.items()}


def test_responses_without_a_reward_are_not_part_of_a_groups_figures():
    results = [RewardResult(1.0), RewardResult.failed("down"), RewardResult(1.0)]
    assert filter_groups(results, "aaa", std_filter()).kept == {"a": False}
    assert filter_groups(results, "aaa", mean_filter(down=0.9)).kept == {"a": True}


@pytest.mark.parametrize(
    "make", [lambda: mean_filter(down=float("nan")), lambda: std_filter(threshold=-1), lambda: mean_filter(up="1")]
)
def test_wrong_thresholds_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_a_group_key_is_needed_for_each():
    with pytest.raises(ConfigError, match="each of 11 responses"):
        filter_groups(RESULTS, "a", no_filter)
