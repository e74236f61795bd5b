"""Rankings of whole groups."""

import re

import pytest

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.groups import grade_groups
from agentenv.rewards.judge import Asking
from agentenv.rewards.listwise import ListwiseReward
from agentenv.rewards.types import Response, Status
from tests.rewards.judges import RuleJudge, ScriptedJudge

QUICK = Asking(backoff_s=0.0)


def longest_first(shown):
    texts = re.findall(r"<response_(\d+)>\n(.*?)\n</response_", shown, re.DOTALL)
    order = sorted(texts, key=lambda pair: -len(pair[1]))
    return "Ranking: " + " > ".join(f"[{place}]" for place, _ in order)


def as_shown(shown):
    count = len(re.findall(r"<response_\d+>", shown))
    return "Ranking: " + " > ".join(str(place) for place in range(1, count + 1))


async def ranked(judge, texts, reference=None, **options):
    reward = ListwiseReward(judge, asking=QUICK, **options)
    return await reward.grade_group([Response(text) for text in texts], reference)


async def test_places_become_rewards_from_one_to_minus_one():
    results = await ranked(RuleJudge(longest_first), ["x", "xxx", "xx"])
    assert [result.reward for result in results] == [-1.0, 1.0, 0.0]
    assert [result.score for result in results] == [0.0, 1.0, 0.5]
    assert tuple(results[0].components) == ListwiseReward.component_names


@pytest.mark.parametrize(
    "reply", ["1 > 2", "[1] > [2] > [2]", "1 > 2 > 4", "0 > 1 > 2", "the first", InfraError("down"), "1, 2, 3"]
)
async def test_no_ranking_is_no_reward_and_never_the_order_in_which_they_came(reply):
    """Elsewhere response 0 has 1.0 when the judge fails."""
    judge = ScriptedJudge(reply)
    reward = ListwiseReward(judge, asking=QUICK)
    graded = await grade_groups(reward, [Response("a"), Response("b"), Response("c")], "kkk")
    assert [(result.reward, result.status) for result in graded.results] == [(None, Status.INFRA)] * 3
    assert graded.results[0].detail.startswith("InfraError: judge: expected a ranking of 3 in 3 attempts")
    assert len(judge.asked) == 3


async def test_a_judge_that_ranks_as_shown_prefers_no_place_in_the_group():
    texts = [f"text {index}" for index in range(5)]
    straight = [result.reward for result in await ranked(RuleJudge(as_shown), texts)]
    turned = [result.reward for result in await ranked(RuleJudge(as_shown), texts[::-1])]
    assert turned == straight[::-1]
    other = [result.reward for result in await ranked(RuleJudge(as_shown), texts, seed=1)]
    assert sorted(other) == sorted(straight) != straight or other != straight


async def test_several_orders_average_out_what_places_do():
    texts = [f"text {index}" for index in range(4)]
    judge = RuleJudge(as_shown)
    results = await ranked(judge, texts, orders=200)
    assert judge.num_asked == 200
    assert max(abs(result.reward) for result in results) < 0.3
    assert results[0].components["n_valid"] == 200.0


async def test_orders_that_failed_are_not_counted():
    judge = ScriptedJudge("Ranking: 1 > 2", "hm", "hm", "hm")
    results = await ranked(judge, ["a", "b"], orders=2)
    assert [result.components["n_valid"] for result in results] == [1.0, 1.0]
    assert sorted(result.reward for result in results) == [-1.0, 1.0]


async def test_equal_texts_share_a_rank_and_no_answer_comes_last():
    judge = RuleJudge(longest_first)
    results = await ranked(judge, ["xxx", "y", "<think>x</think>xxx", "<think>never ends"])
    assert [result.reward for result in results] == [1.0, 0.0, 1.0, -1.0]
    assert results[3].status is Status.NO_ANSWER


@pytest.mark.parametrize(
    ("texts", "rewards"), [(["a"], [0.0]), (["a", "a"], [0.0, 0.0]), (["", ""], [0.0, 0.0]), (["a", ""], [1.0, -1.0])]
)
async def test_nothing_to_rank_is_not_asked(texts, rewards):
    judge = RuleJudge(longest_first)
    assert [result.reward for result in await ranked(judge, texts)] == rewards
    assert judge.num_asked == 0


async def test_a_reference_takes_part_without_a_result__row_10_and_11():
    results = await ranked(RuleJudge(longest_first), ["aaaa", "bb", "rrr"], reference="rrr")
    assert [result.reward for result in results] == [1.0, -1.0, 0.0]
    assert [result.components["win"] for result in results] == [1.0, 0.0, 0.0]
    assert [result.components["win_and"] for result in results] == [1.0, 0.0, 1.0]


async def test_no_group():
    assert await ranked(RuleJudge(longest_first), []) == []


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="orders"):
        ListwiseReward(ScriptedJudge("x"), orders=0)
    with pytest.raises(ConfigError, match=r"ListwiseReward\.judge: expected an object"):
        ListwiseReward("gpt-4")
