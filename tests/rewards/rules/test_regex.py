"""A user's regular expression on a model's text: what it finds, and that it cannot hang."""

import pytest

from agentenv.errors import DataError
from agentenv.rewards.grading import grade
from agentenv.rewards.rules.regex import MAX_CHARS, RegexReward
from agentenv.rewards.types import Response, Status

RUNS_AWAY = (r"(a+)+$", "a" * 40 + "!")


@pytest.mark.parametrize(
    ("options", "text", "matched", "count", "extracted"),
    [
        ({"pattern": "b+"}, "abbb", True, 1, "bbb"),
        ({"pattern": "a(?=(b))"}, "abbb", True, 1, "b"),
        ({"pattern": "z"}, "abbb", False, 0, None),
        ({"pattern": "ab*", "how": "fullmatch"}, "abbb", True, 1, "abbb"),
        ({"pattern": "b*", "how": "fullmatch"}, "abbb", False, 0, None),
        ({"pattern": "b", "how": "count"}, "abbb", True, 3, "b"),
        ({"pattern": "b", "how": "count", "min_count": 4}, "abbb", False, 3, "b"),
        ({"pattern": "b", "how": "count", "min_count": 3, "max_count": 3}, "abbb", True, 3, "b"),
        ({"pattern": "z", "how": "count", "min_count": 0, "max_count": 0}, "abbb", True, 0, None),
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


async def test_an_over_long_text_is_refused():
    result = await RegexReward(pattern="a").grade(Response("a" * (MAX_CHARS + 1)))
    assert (result.status, result.reward) == (Status.PARSE_ERROR, 0.0)
    longest = await RegexReward(pattern="a", how="count").grade(Response("a" * MAX_CHARS))
    assert longest.components["count"] == MAX_CHARS
