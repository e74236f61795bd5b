"""Length penalties: RM-Gallery's band, ROLL's ramp, DAPO's soft punishment, and what is measured."""

import pytest

from agentenv.errors import DataError, InfraError
from agentenv.rewards.grading import grade
from agentenv.rewards.rules.length import LengthReward, OverlongReward, length_penalties
from agentenv.rewards.types import Response, Status


def count_words(text):
    return len(text.split())


async def worth(reward, text, **metadata):
    result = await reward.grade(Response(text, metadata=metadata))
    assert reward.bounds[0] <= result.reward <= reward.bounds[1]
    return result.reward


@pytest.mark.parametrize(
    ("text", "penalty"),
    [
        ("", -0.1), ("abc", -0.07), ("x" * 9, -0.01), ("x" * 10, 0.0), ("x" * 1000, 0.0), ("x" * 1001, -0.01),
        ("x" * 1500, -5.0),
    ],
)  # fmt: skip
async def test_without_a_floor_the_band_is_rm_gallerys_and_with_the_default_it_ends_at_minus_one(text, penalty):
    assert await worth(LengthReward(floor=None), text) == pytest.approx(penalty)
    assert await worth(LengthReward(), text) == pytest.approx(max(penalty, -1.0))


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, -0.5), (99, -0.5), (100, -0.5), (250, -0.25), (400, 0.0), (9999, 0.0)]
)
async def test_rolls_length_reward_is_a_band_with_a_floor(tokens, penalty):
    reward = LengthReward(min_length=400, max_length=None, rate=0.5 / 300, floor=-0.5, unit="tokens")
    assert await worth(reward, "", num_tokens=tokens) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 38), ({"unit": "words"}, 5), ({"unit": "tokens"}, 77), ({"unit": "tokens", "count": count_words}, 5),
        ({"part": "thought"}, 9), ({"part": "thought", "unit": "words"}, 3), ({"part": "final"}, 13),
        ({"part": "final", "unit": "tokens", "count": count_words}, 2),
    ],
)  # fmt: skip
async def test_units_and_parts(options, length):
    text = "<think>one two 3</think>\nnumber  four!<|im_end|>\n<|endoftext|>"
    result = await LengthReward(**options).grade(Response(text, metadata={"num_tokens": 77}))
    assert result.components == {"length": length}


async def test_padding_is_not_measured():
    for pad in ("", "<|endoftext|>" * 50, "  \n"):
        assert (await LengthReward().grade(Response("abc" + pad))).components == {"length": 3.0}


@pytest.mark.parametrize(
    ("text", "penalty"),
    [
        ("no thought", -0.1),
        ("<think></think>x", -0.1),
        ("<think>1234567890</think>", 0.0),
        ("<think>" + "x" * 9999, -0.4),
    ],
)
async def test_thoughts_have_their_own_length_and_a_largest_penalty(text, penalty):
    assert await worth(LengthReward(floor=-0.4, part="thought"), text) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (101, -2.0), (10**6, -2.0)],
)
async def test_daposoft_punishment(tokens, penalty):
    reward = OverlongReward(max_length=100, buffer=20, factor=2.0)
    assert await worth(reward, "x", num_tokens=tokens) == pytest.approx(penalty)
    counted = OverlongReward(max_length=100, buffer=20, factor=2.0, count=lambda text: int(text))
    assert await worth(counted, str(tokens)) == pytest.approx(penalty)


@pytest.mark.parametrize("given", [None, -1, 1.5, True, "7", float("nan"), [], 10**400])
async def test_a_row_without_its_number_of_tokens_is_a_data_error(given):
    for reward in (OverlongReward(max_length=9, buffer=3), LengthReward(unit="tokens")):
        with pytest.raises(DataError, match="num_tokens"):
            await reward.grade(Response("x", metadata={"num_tokens": given}))
        assert (await grade(reward, Response("x"))).status is Status.LABEL


@pytest.mark.parametrize("count", [lambda text: 1 / 0, lambda text: None, lambda text: -1, lambda text: 2.5])
async def test_a_counter_that_fails_is_infra_and_no_length(count):
    reward = LengthReward(unit="tokens", count=count)
    with pytest.raises(InfraError, match="count"):
        await reward.grade(Response("x"))
    assert (await grade(reward, Response("x"))).reward is None


def test_the_seeds_functions_give_penalties_and_lengths():
    responses = ["", "<think>short</think>" + "x" * 30, "<think>" + "y" * 2000]
    assert length_penalties(responses, "all") == ([-0.1, 0.0, -1.0], [0, 50, 2007])
    assert length_penalties(responses, "thought") == ([-0.1, -0.05, -1.0], [0, 5, 2000])
    assert length_penalties([], "all") == ([], [])
