"""Pairs and rankings; the defects are RM-Gallery's and RewardBench's."""

import itertools
import re
import string

import pytest

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.groups.batch import grade_groups
from agentenv.rewards.judges.asking import JudgeRetry
from agentenv.rewards.judges.comparisons import ListwiseReward, PairwiseJudge
from agentenv.rewards.types import Response, Status
from tests.rewards.judges.rule_judges import Down, RuleJudge, ScriptedJudge, between, longer

QUICK = JudgeRetry(backoff_s=0.0)
ONCE = JudgeRetry(attempts=1)


# --- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b", "points"), [("long one", "short", 1.0), ("x", "long", 0.0), ("ab", "cd", 0.5)])
async def test_the_better_one_wins_in_either_order(a, b, points):
    pairwise = PairwiseJudge(judge := RuleJudge(longer))
    assert await pairwise.compare("q", a, b) == points
    assert await pairwise.compare("q", b, a) == 1.0 - points
    assert (judge.num_asked, pairwise.num_compared, pairwise.num_flipped) == (4, 2, 0)


@pytest.mark.parametrize("place", ["A", "B"])
async def test_a_judge_that_prefers_a_place_decides_nothing__reward_bench_272(place):
    """There the order is drawn without a seed, and the same judge's accuracy changes by 0.04."""
    pairwise = PairwiseJudge(ScriptedJudge(f"Verdict: {place}"))
    assert await pairwise.compare("q", "one", "two") == 0.5
    assert (pairwise.num_compared, pairwise.num_flipped) == (1, 1)


async def test_a_tie_in_one_order_leaves_the_verdict_to_the_other():
    pairwise = PairwiseJudge(ScriptedJudge("Verdict: A", "Verdict: TIE"))
    assert await pairwise.compare("q", "one", "two") == 1.0
    assert pairwise.num_flipped == 0


@pytest.mark.parametrize("replies", [["Verdict: A", "both"], ["both", "Verdict: A"], ["both", InfraError("down")]])
async def test_one_order_alone_is_not_a_verdict_and_an_error_no_tie__rm_gallery_nemo_2_2(replies):
    """There an exception, or a reply that cannot be read, is half a point."""
    pairwise = PairwiseJudge(ScriptedJudge(*replies), retry=ONCE)
    with pytest.raises(InfraError):
        await pairwise.compare("q", "one", "two")
    assert pairwise.num_compared == 0


@pytest.mark.parametrize(
    ("a", "b", "points"), [("", "x", 0.0), ("\u200b", "x", 0.0), ("x", "<think>", 1.0), ("", "", 0.5), ("x", "x ", 0.5)]
)
async def test_pairs_that_need_no_judge(a, b, points):
    assert await PairwiseJudge(Down()).compare("q", a, b) == points


@pytest.mark.parametrize(("reply", "points"), [("Verdict: A", 1.0), ("Verdict: B", 0.0), ("Verdict: tie", 0.5)])
async def test_in_the_given_order_the_first_is_shown_first_and_no_thinking(reply, points):
    judge = ScriptedJudge(reply)
    assert await PairwiseJudge(judge, order="given").compare("q", "<think>x</think>one", "two") == points
    (asked,) = judge.asked
    assert [between(asked[1]["content"], name) for name in ("response_a", "response_b")] == ["one", "two"]


async def test_a_drawn_order_is_one_question_and_does_not_depend_on_which_comes_first__reward_bench_272():
    """There it is drawn without a seed: accuracies of one judge differ by up to 0.04."""
    pairs = [(f"{i} one", f"{i} two") for i in range(40)]

    async def said(seed, *, swapped=False):
        """What a judge that prefers the first place makes of the pairs: points of their first."""
        judge = ScriptedJudge("Verdict: A")
        pairwise = PairwiseJudge(judge, order="drawn", seed=seed)
        found = [await pairwise.compare("q", *(pair[::-1] if swapped else pair)) for pair in pairs]
        assert (len(judge.asked), pairwise.num_compared, pairwise.num_flipped) == (40, 40, 0)
        return [1.0 - each for each in found] if swapped else found

    first = await said(0)
    assert first == await said(0) == await said(0, swapped=True) != await said(1)
    assert 5 < sum(first) < 35


# --- lists ----------------------------------------------------------------------------------------------------------


def longest_first(shown):
    """A judge that ranks by length."""
    texts = re.findall(r"<response_([0-9]+)_[0-9a-f]+>\n(.*?)\n</", shown, re.DOTALL)
    return "Ranking: " + " > ".join(f"[{place}]" for place, _ in sorted(texts, key=lambda each: -len(each[1])))


async def ranked(judge, texts, reference=None, *, retry=QUICK, **options):
    """The results of a group."""
    reward = ListwiseReward(judge, retry=retry, **options)
    return await reward.grade_group([Response(text, prompt="q") for text in texts], reference)


async def rewards(*args, **options):
    """Their rewards."""
    return [result.reward for result in await ranked(*args, **options)]


@pytest.mark.parametrize("orders", [1, 2, 3])
async def test_the_best_has_one_and_the_last_zero_however_they_came(orders):
    texts = ["x", "yy", "zzz"]
    for responses in itertools.permutations(texts):
        judge = RuleJudge(longest_first)
        found = await rewards(judge, responses, orders=orders)
        assert dict(zip(responses, found, strict=True)) == {"x": -1.0, "yy": 0.0, "zzz": 1.0}
        assert judge.num_asked == orders


async def test_a_judge_that_ranks_them_as_they_are_shown_ranks_none_first__rm_gallery():
    """There a judge that fails ranks them as they came: the first one gets the highest reward."""
    texts = list(string.ascii_lowercase[:5])
    ranking_line = "Ranking: " + " > ".join(f"[{place}]" for place in range(1, 6))
    assert await rewards(ScriptedJudge(ranking_line), texts) == pytest.approx([0.0] * 5)


async def test_failed_rankings_are_left_out_if_enough_succeeded_else_the_result_is_unknown():
    replies = ["Ranking: 1 > 2", "first", "Ranking: 1 > 2", "second"]
    with pytest.raises(InfraError, match="at least 4 of 4 verdicts, got 2"):
        await ranked(ScriptedJudge(*replies), ["a", "b"], orders=4, retry=ONCE)
    found = await ranked(ScriptedJudge(*replies), ["a", "b"], orders=4, min_orders=2, retry=ONCE)
    assert sorted(result.reward for result in found) == [-1.0, 1.0]
    assert [result.components["n_valid"] for result in found] == [2.0, 2.0]


@pytest.mark.parametrize(
    "reply", ["1 > 2", "[1] > [2] > [2]", "1 > 2 > 4", "0 > 1 > 2", "the first", InfraError("down"), "1, 2, 3"]
)
async def test_a_missing_ranking_is_a_missing_reward_and_never_the_order_of_arrival(reply):
    """Elsewhere response 0 has 1.0 when the judge fails."""
    judge = ScriptedJudge(reply)
    reward = ListwiseReward(judge, orders=1, retry=QUICK)
    graded = await grade_groups(reward, [Response("a"), Response("b"), Response("c")], "kkk")
    assert [(result.reward, result.status) for result in graded.results] == [(None, Status.INFRA)] * 3
    down = isinstance(reply, InfraError)
    said = "InfraError: judge: expected a reply" if down else "JudgeUnclear: judge: expected a ranking of 3"
    assert graded.results[0].detail.startswith(f"{said} in 3 attempts, the last ")
    assert len(judge.asked) == 3


async def test_equal_texts_share_a_rank_and_no_answer_comes_last():
    judge = RuleJudge(longest_first)
    results = await ranked(judge, ["xxx", "y", "<think>x</think>xxx", "<think>never ends", "\u200b\u2800" * 9])
    assert [result.reward for result in results] == [1.0, 0.0, 1.0, -1.0, -1.0]
    assert [result.status for result in results[3:]] == [Status.NO_ANSWER] * 2


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


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PairwiseJudge(Down(), order="random"), "PairwiseJudge"),
        (lambda: PairwiseJudge(Down(), voting={"vote": 3}), "PairwiseJudge"),
        (lambda: ListwiseReward(Down(), orders=0), "orders"),
        (lambda: ListwiseReward(Down(), orders=2, min_orders=3), "min_orders"),
        (lambda: ListwiseReward("gpt-4"), r"ListwiseReward\.judge: expected an object"),
    ],
)
def test_wrong_arguments_are_named(make, named):
    with pytest.raises(ConfigError, match=named):
        make()
