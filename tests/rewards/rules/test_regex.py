"""A user's regular expression on a model's text: what it finds, and that it cannot hang."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import ConfigError, DataError
from agentenv.rewards.grading import grade
from agentenv.rewards.rules.regex import MAX_CHARS, RegexReward
from agentenv.rewards.types import Response, Status

RUNS_AWAY = (r"(a+)+$", "a" * 40 + "!")


@pytest.mark.parametrize(
    ("options", "text", "matched", "count", "extracted"),
    [
        ({"pattern": "b+"}, "abbb", True, 1, "bbb"),
        ({"pattern": "(z)?b"}, "abbb", True, 1, "b"),
        ({"pattern": "a(?=(b))"}, "abbb", True, 1, "b"),
        ({"pattern": "z"}, "abbb", False, 0, None),
        ({"pattern": "(?i)B"}, "abbb", True, 1, "b"),
        ({"pattern": "ab*", "how": "fullmatch"}, "abbb", True, 1, "abbb"),
        ({"pattern": "b*", "how": "fullmatch"}, "abbb", False, 0, None),
        ({"pattern": "b", "how": "count"}, "abbb", True, 3, "b"),
        ({"pattern": "b", "how": "count", "min_count": 4}, "abbb", False, 3, "b"),
        ({"pattern": "b", "how": "count", "min_count": 3, "max_count": 3}, "abbb", True, 3, "b"),
        ({"pattern": "z", "how": "count", "min_count": 0, "max_count": 0}, "abbb", True, 0, None),
        ({"pattern": "bb", "how": "count"}, "abbb", True, 1, "bb"),
        ({"pattern": "x"}, "<think>x</think>y<|im_end|>", False, 0, None),
        ({"pattern": "x", "part": "thought"}, "<think>x</think>y", True, 1, "x"),
        ({"pattern": "x", "part": "all"}, "<think>x</think>y", True, 1, "x"),
    ],
)
async def test_text_that_a_pattern_finds(options, text, matched, count, extracted):
    result = await RegexReward(**options).grade(Response(text))
    assert (result.reward, result.score, result.status) == (float(matched), float(matched), Status.OK)
    assert result.components == {"matched": float(matched), "count": float(count)}
    assert result.extracted == extracted


async def test_the_label_may_hold_the_pattern_and_the_scale_may_be_another():
    reward = RegexReward(how="fullmatch", passed=0.0, failed=-1.0)
    assert reward.bounds == (-1.0, 0.0)
    assert [(await reward.grade(Response(text, r"\d+"))).reward for text in ("42", "x")] == [0.0, -1.0]


@pytest.mark.parametrize("label", [None, 5, "(", "[", "a{99999999999999999999}", ["a"], "(?P<x>a)(?P<x>b)"])
async def test_a_label_that_is_not_a_pattern_is_a_data_error(label):
    with pytest.raises(DataError, match="regular expression"):
        await RegexReward().grade(Response("x", label))
    assert (await grade(RegexReward(), Response("x", label))).status is Status.LABEL


@pytest.mark.long
async def test_a_pattern_that_runs_away_is_a_timeout():
    pattern, text = RUNS_AWAY
    result = await RegexReward(pattern=pattern, passed=2.0, failed=-0.5, cpu_limit_s=0.3).grade(Response(text))
    assert (result.status, result.reward, result.score) == (Status.TIMEOUT, -0.5, 0.0)


@pytest.mark.long
async def test_one_that_runs_away_does_not_disturb_others():
    pattern, text = RUNS_AWAY
    slow = asyncio.create_task(RegexReward(pattern=pattern, cpu_limit_s=0.3).grade(Response(text)))
    quick = [await RegexReward(pattern=pattern).grade(Response("a" * n)) for n in range(1, 9)]
    assert [result.reward for result in quick] == [1.0] * 8
    assert (await slow).status is Status.TIMEOUT
    assert (await RegexReward(pattern=pattern).grade(Response("aaa"))).reward == 1.0


async def test_an_over_long_text_is_refused():
    result = await RegexReward(pattern="a").grade(Response("a" * (MAX_CHARS + 1)))
    assert (result.status, result.reward) == (Status.PARSE_ERROR, 0.0)
    assert (await RegexReward(pattern="a", how="count").grade(Response("a" * MAX_CHARS))).components[
        "count"
    ] == MAX_CHARS


async def test_thinking_that_was_not_ended_is_not_an_answer():
    result = await RegexReward(pattern="").grade(Response("<think>a"))
    assert (result.status, result.reward) == (Status.NO_ANSWER, 0.0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"pattern": "("}, "pattern"), ({"pattern": 5}, "pattern"), ({"how": "match"}, "how"),
        ({"part": "answer"}, "part"), ({"min_count": 2}, "how"), ({"how": "count", "min_count": -1}, "min_count"),
        ({"how": "count", "min_count": 3, "max_count": 2}, "max_count"), ({"passed": None}, "passed"),
        ({"failed": float("nan")}, "failed"), ({"cpu_limit_s": 0}, "cpu_limit_s"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_config_errors(arguments, name):
    with pytest.raises(ConfigError, match=name):
        RegexReward(**arguments)


@pytest.mark.long
@given(text=st.text(), how=st.sampled_from(["search", "fullmatch", "count"]))
@settings(max_examples=60, deadline=None)
async def test_any_text_has_the_same_result_within_bounds(text, how):
    reward = RegexReward(pattern=r"(?s)(\w+\s?)*\W", how=how)
    results = [await reward.grade(Response(text[:20])) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0].reward in (0.0, 1.0)
    assert set(results[0].components) == {"matched", "count"}
