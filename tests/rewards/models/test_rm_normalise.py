"""Rewards on a scale: against numpy, in parts, forgotten, clipped, without a reward, over a resume, and by group."""

import asyncio
import json
import math
import threading
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.grading import grade, grade_all
from agentenv.rewards.groups.batch import grade_groups
from agentenv.rewards.models.normalise import Normalised, NormalisedGroups, RunningNorm, scaled_by_group
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.weighted_sum import Term, WeightedSum

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

    async def grade_group(self, responses, reference=None):
        return [await self.grade(response) for response in responses]


async def rewards(reward, *values):
    return [(await grade(reward, Response(str(value)))).reward for value in values]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@given(st.lists(st.lists(NUMBERS, max_size=10), max_size=5))
@settings(max_examples=60)
def test_a_running_norm_has_numpys_mean_and_deviation_in_parts_and_merged(parts):
    whole, merged = RunningNorm(), RunningNorm()
    for part in parts:
        whole.update(part)
        other = RunningNorm()
        other.update(part)
        merged.merge(other)
    values = [value for part in parts for value in part]
    assert whole.num == merged.num == len(values)
    if values:
        for norm in (whole, merged):
            assert norm.mean == pytest.approx(numpy.mean(values), abs=1e-6)
            assert norm.std == pytest.approx(numpy.std(values), rel=1e-6, abs=1e-5)


def test_a_running_norm_keeps_its_precision_far_from_zero():
    norm = RunningNorm()
    norm.update([1e9 + each for each in (4.0, 7.0, 13.0, 16.0)])
    assert norm.std == pytest.approx(math.sqrt(22.5), rel=1e-9)


def test_a_missing_reward_stays_none_and_is_not_counted():
    norm = RunningNorm(epsilon=0.0)
    norm.update([1.0, None, 3.0])
    assert (norm.num, norm.mean, norm.std) == (2, 2.0, 1.0)
    assert norm.scaled([None, 5.0]) == [None, 3.0]
    assert scaled_by_group([1.0, None, 3.0], ["g"] * 3, epsilon=0.0) == [-1.0, None, 1.0]


def test_scaled_numbers_are_clipped():
    norm = RunningNorm(epsilon=0.0, clip=2.0)
    assert norm.scaled([9.0]) == [2.0]
    single = RunningNorm()
    single.update([4.0])
    assert single.scaled([5.0]) == [5.0]
    norm.update([1.0, 3.0])
    assert norm.scaled([1.0, 99.0, -99.0]) == [-1.0, 2.0, -2.0]
    assert scaled_by_group([0.0, 0.0, 0.0, 8.0], "gggg", clip=1.5) == [pytest.approx(-0.577, abs=1e-3)] * 3 + [1.5]


def test_equal_numbers_scale_to_zero():
    norm = RunningNorm(epsilon=0.0)
    norm.update([4.0, 4.0])
    assert norm.scaled([4.0]) == [0.0]
    assert scaled_by_group([0.1, 0.1, 0.1], "aaa", epsilon=0.0) == [0.0] * 3


def test_each_group_is_scaled_by_its_own():
    assert scaled_by_group([1.0, 10.0, 3.0, 30.0], "abab", epsilon=0.0) == [-1.0, -1.0, 1.0, 1.0]
    assert scaled_by_group([1.0, 10.0, 3.0, 30.0], "abab", divide=False) == [-1.0, -10.0, 1.0, 10.0]


@pytest.mark.parametrize("kwargs", [{"epsilon": -1.0}, {"clip": -1.0}, {"clip": math.nan}])
def test_arguments_out_of_range_are_refused(kwargs):
    with pytest.raises(ConfigError):
        RunningNorm(**kwargs)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.floats(1.0, 100.0))
@settings(max_examples=60)
def test_with_a_half_life_later_numbers_weigh_more(values, half_life):
    norm = RunningNorm(half_life=half_life)
    norm.update(values)
    weights = 0.5 ** (numpy.arange(len(values))[::-1] / half_life)
    mean = numpy.average(values, weights=weights)
    assert norm.num == len(values)
    assert norm.mean == pytest.approx(mean, abs=1e-4)
    assert norm.std == pytest.approx(
        math.sqrt(numpy.average((values - mean) ** 2, weights=weights)), rel=1e-4, abs=1e-3
    )


@pytest.mark.long
@given(st.lists(NUMBERS, max_size=12), st.lists(NUMBERS, max_size=12), st.sampled_from([None, 3.0]))
def test_a_norm_continues_from_its_state_as_json(before, after, half_life):
    whole, resumed = RunningNorm(half_life=half_life), RunningNorm(half_life=half_life)
    whole.update(before)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
    whole.update(after)
    resumed.update(after)
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    "change",
    [{"num": -1}, {"num": 1.5}, {"num": 0}, {"mean": math.nan}, {"squares": -1.0}, {"squares": math.inf},
     {"weight": 0.0}, {"weight": 9.0}, {"extra": 1}],
)  # fmt: skip
def test_input_that_is_not_a_state_is_refused_and_changes_nothing(change):
    norm = RunningNorm()
    norm.update([1.0, 2.0])
    known = norm.state_dict()
    with pytest.raises(ConfigError, match="state"):
        norm.load_state_dict({**known, **change})
    with pytest.raises(ConfigError, match="state"):
        norm.load_state_dict(None)
    assert norm.state_dict() == known


def test_values_without_groups_are_refused():
    with pytest.raises(ConfigError, match="one for each"):
        scaled_by_group([1.0], [])


# --- rewards ----------------------------------------------------------------------------------------------------------


async def test_a_running_scale_is_that_of_the_rewards_so_far():
    found = await rewards(Normalised(Says()), 4, 8, 0)
    assert found[:2] == [0.0, 1.0]  # the first is its own mean
    assert found[2] == pytest.approx(-4.0 / numpy.std([4, 8, 0]))


async def test_the_first_rewards_are_no_larger_than_later_ones():
    """A raw 25 beside later ones of about 1 would be all that the first train step learns from."""
    assert await rewards(Normalised(Says()), 25, 25, 25) == [0.0, 0.0, 0.0]


async def test_a_calibration_set_fixes_the_scale_from_the_first_response_on():
    reward = Normalised(Says(), calibration=[1.0, 3.0])
    assert await rewards(reward, 2) == [0.0]
    assert reward.norm.num == 3


async def test_a_fixed_scale_does_not_depend_on_what_came_before():
    reward = Normalised(Says(), kind="fixed", calibration=[1.0, 3.0])
    assert await rewards(reward, 5, 5, -1, 5) == [3.0, 3.0, -3.0, 3.0]
    assert reward.norm.num == 2


async def test_without_centering_a_reward_keeps_its_sign():
    reward = Normalised(Says(), kind="fixed", calibration=[10.0, 14.0], center=False)
    assert await rewards(reward, 1, -1) == [0.5, -0.5]


async def test_a_result_keeps_its_fields_and_adds_the_raw_reward_and_the_clip():
    reward = Normalised(Says(), kind="fixed", calibration=[1.0, 3.0], clip=2.0)
    high, plain = await grade_all(reward, [Response("9"), Response("3")])
    assert (high.reward, high.score, high.extracted) == (2.0, 0.5, "9")
    assert dict(high.components) == {"said": 9.0, "raw": 9.0, "clipped": 1.0}
    assert dict(plain.components) == {"said": 3.0, "raw": 3.0, "clipped": 0.0}
    assert reward.bounds == (-2.0, 2.0)


async def test_a_failed_reward_stays_none_and_enters_no_statistics():
    reward = Normalised(Says(), calibration=[1.0, 3.0])
    failed, raised = await grade_all(reward, [Response("none"), Response("raise")])
    assert (failed.reward, failed.status, raised.reward) == (None, Status.INFRA, None)
    assert dict(failed.components) == {"raw": None, "clipped": None}
    assert reward.norm.num == 2


async def test_a_resumed_session_continues_with_the_same_scale():
    first, second = Normalised(Says(), half_life=5.0), Normalised(Says(), half_life=5.0, calibration=[99.0])
    await rewards(first, 1, 5, 2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert await rewards(second, 7, 3) == await rewards(first, 7, 3)


async def test_a_scaled_reward_is_a_term_of_a_sum():
    scaled = Normalised(Says(), kind="fixed", calibration=[1.0, 3.0])
    result = await grade(WeightedSum({"rm": Term(scaled, 0.5)}), Response("5"))
    assert result.reward == 1.5
    assert {"rm": 3.0, "rm/raw": 5.0, "rm/clipped": 0.0}.items() <= dict(result.components).items()


@pytest.mark.long
def test_event_loops_of_many_threads_lose_no_reward(monkeypatch):
    reward = Normalised(Says(), half_life=None)
    update = RunningNorm.update

    def interrupted(norm, values):
        """As if the threads changed in the midst of it, which they do too seldom to be waited for."""
        copy = {**vars(norm)}
        time.sleep(0.0001)
        vars(norm).update(copy)
        update(norm, values)

    monkeypatch.setattr(RunningNorm, "update", interrupted)

    def session():
        asyncio.run(grade_all(reward, [Response(str(value)) for value in range(100)]))

    threads = [threading.Thread(target=session) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reward.norm.num == 800
    assert reward.norm.mean == pytest.approx(49.5)
    assert reward.norm.std == pytest.approx(numpy.std(range(100)))


async def test_groups_are_scaled_each_by_its_own():
    responses = [Response(text) for text in ("1", "10", "3", "30", "none", "7")]
    found = await grade_groups(NormalisedGroups(Says()), responses, ["a", "b", "a", "b", "b", "c"])
    assert [result.reward for result in found.results] == [-1.0, -1.0, 1.0, 1.0, None, 0.0]
    assert found.results[3].components == {"said": 30.0, "raw": 30.0, "clipped": 0.0}


async def test_groups_may_be_centred_only_and_clipped():
    responses = [Response("1"), Response("9")]
    results = await NormalisedGroups(Says(), divide=False, clip=3.0).grade_group(responses)
    assert [(each.reward, each.components["clipped"]) for each in results] == [(-3.0, 1.0), (3.0, 1.0)]


@pytest.mark.parametrize(
    "options",
    [{"kind": "mean"}, {"clip": 0.0}, {"clip": None}, {"half_life": 0.5}, {"calibration": "1,2"},
     {"calibration": [1.0, math.nan]}, {"kind": "fixed"}, {"kind": "fixed", "calibration": [2.0, 2.0]}],
)  # fmt: skip
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"Normalised|RunningNorm"):
        Normalised(Says(), **options)


@pytest.mark.parametrize("make", [Normalised, NormalisedGroups])
def test_only_a_reward_can_be_scaled(make):
    with pytest.raises(ConfigError, match="expected a reward"):
        make(object())
