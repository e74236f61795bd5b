"""Rewards on a scale: against numpy, forgotten, clipped, and without a reward."""

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import InfraError
from agentenv.rewards.grading import grade, grade_all
from agentenv.rewards.models.reward import Normalized, RunningNorm
from agentenv.rewards.types import Response, RewardResult, Status

NUMBERS = st.floats(-1e6, 1e6)


class Says:
    """Gives the number that a response says; `none` fails, `raise` raises."""

    bounds = (-math.inf, math.inf)
    component_names = ("said",)

    async def grade(self, response):
        if response.text == "raise":
            raise InfraError("gone")
        if response.text == "none":
            return RewardResult.failed("no number")
        value = float(response.text)
        return RewardResult(value, score=0.5, components={"said": value}, extracted=response.text)


async def rewards(reward, *values):
    return [(await grade(reward, Response(str(value)))).reward for value in values]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_running_norm_keeps_its_precision_far_from_zero():
    norm = RunningNorm()
    for each in (4.0, 7.0, 13.0, 16.0):
        norm.update(1e9 + each)
    assert norm.std == pytest.approx(math.sqrt(22.5), rel=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.one_of(st.none(), st.floats(1.0, 100.0)))
@settings(max_examples=60)
def test_a_norm_has_numpys_mean_and_deviation_and_with_a_half_life_later_numbers_weigh_more(values, half_life):
    norm = RunningNorm(half_life=half_life)
    for value in values:
        norm.update(value)
    weights = 0.5 ** (numpy.arange(len(values))[::-1] / (half_life or math.inf))
    mean = numpy.average(values, weights=weights)
    assert norm.num == len(values)
    assert norm.mean == pytest.approx(mean, abs=1e-4)
    assert norm.std == pytest.approx(
        math.sqrt(numpy.average((values - mean) ** 2, weights=weights)), rel=1e-4, abs=1e-3
    )


# --- rewards ----------------------------------------------------------------------------------------------------------


async def test_a_running_scale_is_that_of_the_rewards_so_far():
    found = await rewards(Normalized(Says()), 4, 8, 0)
    assert found[:2] == [0.0, 1.0]  # the first is its own mean
    assert found[2] == pytest.approx(-4.0 / numpy.std([4, 8, 0]))


async def test_a_calibration_set_fixes_the_scale_from_the_first_response_on():
    reward = Normalized(Says(), calibration=[1.0, 3.0])
    assert await rewards(reward, 2) == [0.0]
    assert reward.norm.num == 3


async def test_a_fixed_scale_does_not_depend_on_what_came_before():
    reward = Normalized(Says(), kind="fixed", calibration=[1.0, 3.0])
    assert await rewards(reward, 5, 5, -1, 5) == [3.0, 3.0, -3.0, 3.0]
    assert reward.norm.num == 2


async def test_a_result_keeps_its_fields_and_adds_the_raw_reward_and_the_clip():
    reward = Normalized(Says(), kind="fixed", calibration=[1.0, 3.0], clip=2.0)
    high, plain = await grade_all(reward, [Response("9"), Response("3")])
    assert (high.reward, high.score, high.extracted) == (2.0, 0.5, "9")
    assert dict(high.components) == {"said": 9.0, "raw": 9.0, "clipped": 1.0}
    assert dict(plain.components) == {"said": 3.0, "raw": 3.0, "clipped": 0.0}
    assert reward.bounds == (-2.0, 2.0)


async def test_a_failed_reward_stays_none_and_enters_no_statistics():
    reward = Normalized(Says(), calibration=[1.0, 3.0])
    failed, raised = await grade_all(reward, [Response("none"), Response("raise")])
    assert (failed.reward, failed.status, raised.reward) == (None, Status.INFRA, None)
    assert dict(failed.components) == {"raw": None, "clipped": None}
    assert reward.norm.num == 2


@pytest.mark.long
def test_event_loops_of_many_threads_lose_no_reward(monkeypatch):
    reward = Normalized(Says(), half_life=None)
    update = RunningNorm.update

    def interrupted(norm, value):
        """As if the threads changed in the midst of it, which they do too seldom to be waited for."""
        copy = {**vars(norm)}
        time.sleep(0.0001)
        vars(norm).update(copy)
        update(norm, value)

    monkeypatch.setattr(RunningNorm, "update", interrupted)

    def session():
        asyncio.run(grade_all(reward, [Response(str(value)) for value in range(100)]))

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(session)
    assert reward.norm.num == 800
    assert reward.norm.mean == pytest.approx(49.5)
    assert reward.norm.std == pytest.approx(numpy.std(range(100)))
