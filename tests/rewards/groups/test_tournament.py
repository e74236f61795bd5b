"""Tournaments: points, order, failures, references. The defects are those of RM-Gallery and OpenJudge."""

import asyncio
import math
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.rewards.groups.tournament import Tournament, bradley_terry
from agentenv.rewards.types import Response, Status
from tests.rewards.judges.rule_judges import Comparing

BEATS = {("rock", "scissors"), ("scissors", "paper"), ("paper", "rock")}
MEASURES = ["comparison_score", "bradley_terry"]


def by_length(a, b):
    return 0.5 if len(a) == len(b) else float(len(a) > len(b))


def cycle(a, b):
    return float((a, b) in BEATS)


async def played(function, texts, reference=None, **options):
    comparing = Comparing(function)
    results = await Tournament(comparing, **options).grade_group([Response(text) for text in texts], reference)
    return results, comparing.asked


async def scores(function, texts, **options):
    results, _ = await played(function, texts, **options)
    return [result.reward for result in results]


async def test_the_comparison_score_is_points_from_minus_one_to_one__row_23():
    results, asked = await played(by_length, ["aaa", "a", "bb"])
    assert [result.reward for result in results] == [1.0, -1.0, 0.0]
    assert [result.score for result in results] == [1.0, 0.0, 0.5]
    assert dict(results[2].components) == {"comparison_score": 0.0, "n_valid": 4.0, "win": None, "win_and": None}
    assert sorted(asked) == sorted((a, b) for a in ("aaa", "a", "bb") for b in ("aaa", "a", "bb") if a != b)


@pytest.mark.parametrize("both_orders", [True, False])
@pytest.mark.parametrize("measure", MEASURES)
async def test_a_cycle_of_three_is_even_regardless_of_the_order(measure, both_orders):
    """Elsewhere 1, 0, -1 by the index of the response, or -1, .999, 1 by the order of the games."""
    for texts in (["rock", "paper", "scissors"], ["scissors", "rock", "paper"], ["paper", "rock", "scissors"]):
        rewards = await scores(cycle, texts, measure=measure, both_orders=both_orders)
        assert rewards == [pytest.approx(0.0, abs=1e-9)] * 3
        assert len(set(rewards)) == 1


async def test_asked_once_per_pair_the_order_is_drawn_and_not_the_groups():
    texts = [f"text {index}" for index in range(12)]
    _, asked = await played(by_length, texts, both_orders=False)
    assert len(asked) == len({frozenset(pair) for pair in asked}) == 66
    assert 15 < sum(texts.index(a) < texts.index(b) for a, b in asked) < 51
    _, again = await played(by_length, texts[::-1], both_orders=False)
    assert sorted(asked) == sorted(again)
    _, other = await played(by_length, texts, both_orders=False, seed=1)
    assert sorted(asked) != sorted(other)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.sampled_from(["", "a", "b", "c", "dd", "ee", "fff", "gggg"]), min_size=1, max_size=7),
    order=st.randoms(use_true_random=False),
    measure=st.sampled_from(MEASURES),
    both_orders=st.booleans(),
    opponents=st.sampled_from([None, 1, 2, 3]),
    seed=st.integers(0, 3),
)
async def test_no_place_in_the_group_matters(texts, order, **options):
    def judged(a, b):
        return [0.0, 0.5, 1.0, None][crc32(f"{a} {b}".encode()) % 4]

    shuffled = order.sample(range(len(texts)), len(texts))
    straight = await scores(judged, texts, **options)
    permuted = await scores(judged, [texts[index] for index in shuffled], **options)
    assert permuted == [straight[index] for index in shuffled]
    assert all(
        straight[i] == straight[j] for i in range(len(texts)) for j in range(len(texts)) if texts[i] == texts[j]
    ), "equal texts have equal rewards"


@pytest.mark.parametrize("error", [InfraError("down"), ConnectionError("down")])
async def test_failed_comparisons_are_not_counted(error):
    def judged(a, b):
        if "c" in (a, b):
            raise error
        return by_length(a, b)

    results, _ = await played(judged, ["aa", "b", "c"])
    assert [result.reward for result in results] == [1.0, -1.0, None]
    assert [result.status for result in results] == [Status.OK, Status.OK, Status.INFRA]
    assert [result.components["n_valid"] for result in results] == [2.0, 2.0, 0.0]
    assert f"4 of 6 comparisons failed; the first: {type(error).__name__}: down" in results[2].detail


@pytest.mark.parametrize("wrong", [ValueError("bug"), "yes", float("nan"), 0.7])
async def test_an_error_of_the_comparers_author_is_no_failed_comparison(wrong):
    def judged(a, b):
        if "z" not in (a, b):
            return by_length(a, b)
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    with pytest.raises(ContractError, match="compare: expected"):
        await played(judged, ["aa", "b", "z"])


@pytest.mark.parametrize(
    ("texts", "reference", "rewards"),
    [
        (["a", "b", ""], None, [None, None, -1.0]),
        (["a", "a", "b"], None, [None, None, None]),
        (["a", "b"], "a", [None, None]),
        (["a", "a", ""], None, [0.5, 0.5, -1.0]),
    ],
)
@pytest.mark.parametrize("measure", MEASURES)
async def test_a_dead_judge_leaves_no_reward_for_what_needs_no_comparison(texts, reference, rewards, measure):
    """Else who wrote anything at all would have the best reward beside one that wrote nothing."""
    results, _ = await played(lambda a, b: None, texts, reference, measure=measure)
    assert [result.status for result in results if result.reward is None] == [Status.INFRA] * rewards.count(None)
    assert [result.components["comparison_score"] for result in results] == rewards
    assert [result.components["win_and"] for result in results] == [None] * len(texts)
    assert all(result.reward < 0 for result in results if not result.extracted and result.reward is not None)


def test_a_comparison_that_hangs_fails_alone(virtual_clock):
    class Hangs:
        async def compare(self, prompt, a, b):
            if "slow" in (a, b):
                await asyncio.Event().wait()
            return by_length(a, b)

    group = [Response("aa"), Response("b"), Response("slow")]
    results = virtual_clock.run(Tournament(Hangs(), limit_s=60.0).grade_group(group))
    assert [result.reward for result in results] == [1.0, -1.0, None]


async def test_every_response_is_compared_with_the_reference__row_11():
    """The seed compares response 0 with response 1 and gives win 0.0 to all others."""
    results, _ = await played(by_length, ["aaaa", "bbb", "cc", "d"], reference="<think>so</think>rrr")
    assert [result.components["win"] for result in results] == [1.0, 0.0, 0.0, 0.0]
    assert [result.components["win_and"] for result in results] == [1.0, 1.0, 0.0, 0.0]
    assert [result.components["n_valid"] for result in results] == [8.0] * 4


@pytest.mark.parametrize("reference", [None, "", "<think>never ends"])
async def test_without_a_reference_wins_are_not_known__row_10(reference):
    results, asked = await played(by_length, ["aa", "b"], reference=reference)
    assert [result.components["win"] for result in results] == [None, None]
    assert [result.components["win_and"] for result in results] == [None, None]
    assert len(asked) == 2


async def test_a_reference_whose_comparisons_failed_is_never_beaten():
    def judged(a, b):
        return None if "r" in (a, b) else by_length(a, b)

    results, _ = await played(judged, ["aa", "b"], reference="r")
    assert [(result.reward, result.components["win"]) for result in results] == [(1.0, None), (-1.0, None)]


async def test_thinking_is_not_shown_and_equal_answers_tie_unasked():
    results, asked = await played(by_length, ["<think>long thought</think>a", "a", "bb<|im_end|>"])
    assert [result.reward for result in results] == [-0.5, -0.5, 1.0]
    assert sorted(asked) == [("a", "bb"), ("bb", "a")]


async def test_a_response_without_an_answer_loses_unasked():
    results, asked = await played(by_length, ["<think>never ends", "a", ""])
    assert [result.reward for result in results] == [-0.5, 1.0, -0.5]
    assert [result.status for result in results] == [Status.NO_ANSWER, Status.OK, Status.NO_ANSWER]
    assert [result.extracted for result in results] == [None, "a", None]
    assert [result.components["n_valid"] for result in results] == [4.0] * 3
    assert asked == []


@pytest.mark.parametrize(("opponents", "count", "games"), [(1, 6, 3), (2, 6, 6), (3, 6, 9), (1, 7, 7), (9, 4, 6)])
async def test_a_budget_of_opponents_is_spread_evenly(opponents, count, games):
    texts = [f"text {index}" for index in range(count)]
    results, asked = await played(by_length, texts, opponents=opponents)
    assert len(asked) == 2 * games
    met = [sum(text in pair for pair in asked) / 2 for text in texts]
    assert all(min(opponents, count - 1) <= num <= opponents + 1 for num in met)
    assert [result.components["n_valid"] for result in results] == [2 * num for num in met]
    _, other = await played(by_length, texts, opponents=opponents, seed=5)
    assert len(other) == len(asked)


def test_the_prior_of_bradley_terry_keeps_a_winner_of_everything_finite():
    """Two games won of two, and one tied with the average: x solves 2.5/x = 2/(x + 1/x) + 1/(x + 1), by hand 2.7511."""
    assert math.exp(bradley_terry([[0, 2], [0, 0]])[0]) == pytest.approx(2.7511, rel=1e-5)
    assert bradley_terry([[0, 1, 0], [0, 0, 1], [1, 0, 0]]) == pytest.approx([0.0] * 3, abs=1e-9)


async def test_bradley_terry_is_the_chance_to_beat_an_average_answer():
    high, middle, low = await scores(by_length, ["aaa", "bb", "c"], measure="bradley_terry")
    assert (0 < high < 1, middle, low) == (True, pytest.approx(0.0, abs=1e-9), pytest.approx(-high))


@pytest.mark.parametrize(
    "options", [{"measure": "dgr"}, {"opponents": 0}, {"max_concurrent": 0}, {"limit_s": 0}, {"opponents": 1.5}]
)
def test_wrong_arguments_are_named(options):
    with pytest.raises(ConfigError, match=f"Tournament.{next(iter(options))}"):
        Tournament(Comparing(by_length), **options)


@pytest.mark.parametrize("comparer", [None, object(), lambda prompt, a, b: 1.0, type("Two", (), {"compare": min})()])
def test_objects_that_cannot_compare_are_refused_before_anything_is_judged(comparer):
    with pytest.raises(ConfigError, match=r"Tournament\.comparer: expected an object with compare\(prompt, a, b\)"):
        Tournament(comparer)
