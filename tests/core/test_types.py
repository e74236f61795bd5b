"""The inputs and answers of an episode: what they refuse, and in which words."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from agentenv.core.types import Limits, SamplingParams, StepResult, StopReason
from agentenv.errors import ContractError

WRONG_SAMPLING = [
    ("temperature", -0.1, "a number >= 0"),
    ("temperature", math.nan, "a number >= 0"),
    ("top_p", 0.0, "a number in (0, 1]"),
    ("top_p", 1.01, "a number in (0, 1]"),
    ("top_k", -2, "an integer >= -1"),
    ("min_p", -0.01, "a number in [0, 1]"),
    ("min_p", 1.5, "a number in [0, 1]"),
    ("max_tokens", 0, "None or an integer >= 1"),
    ("max_tokens", -5, "None or an integer >= 1"),
    ("max_tokens", "256", "None or an integer >= 1"),
    ("top_p", None, "a number in (0, 1]"),
    ("min_tokens", -1, "an integer >= 0"),
    ("stop", "END", "a tuple of strings"),
]
WRONG_LIMITS = [
    ("max_length", 1, "an integer >= 2"),
    ("max_turns", 0, "an integer >= 1"),
    ("max_turns", "3", "an integer >= 1"),
    ("step_timeout_s", 0, "seconds > 0"),
    ("step_timeout_s", math.nan, "seconds > 0"),
    ("episode_timeout_s", -1.0, "seconds > 0"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG_SAMPLING)
def test_sampling_params_refuse_what_no_engine_can_sample_with(name, value, expected):
    with pytest.raises(ValueError, match=f"^SamplingParams.{name}: ") as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"SamplingParams.{name}: expected {expected}, got {value!r}."


@pytest.mark.parametrize(("name", "value", "expected"), WRONG_LIMITS)
def test_limits_refuse_budgets_in_which_no_turn_fits(name, value, expected):
    with pytest.raises(ValueError, match=f"^Limits.{name}: ") as caught:
        Limits(**{name: value})
    assert str(caught.value) == f"Limits.{name}: expected {expected}, got {value!r}."


def test_sampling_params_take_the_edges_of_their_ranges():
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=1, min_tokens=0, stop=("END",))
    SamplingParams(min_p=1.0, max_tokens=None)


@pytest.mark.parametrize("field", ["reward", "score"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])  # the last is none in float32
def test_a_step_result_refuses_numbers_that_are_not_finite(field, value):
    with pytest.raises(ContractError, match=f"StepResult.{field}: expected a finite number, got "):
        StepResult(**{field: value})


@pytest.mark.parametrize("value", [None, "1.0", [1.0], {}, object(), Fraction(10**400)])
def test_a_step_result_refuses_what_is_not_a_number_and_a_missing_reward_with_the_way_out(value):
    with pytest.raises(ContractError, match=r"StepResult.reward: expected a number, got .*\. Raise InfraError if"):
        StepResult(reward=value)
    if value is not None:
        with pytest.raises(ContractError, match=r"StepResult.score: expected a number, got "):
            StepResult(score=value)


@pytest.mark.parametrize("info", [None, [1], {"n": 10**5000}, {"n": Fraction(10**400)}, {"a": None, "b": 1, "c": "x"}])
def test_a_step_result_refuses_info_that_no_record_holds(info):
    with pytest.raises(ContractError, match=r"^StepResult\.info.*: expected a "):
        StepResult(info=info)


def test_rewards_and_scores_become_plain_floats():
    result = StepResult(reward=np.float32(0.5), score=True)
    assert (type(result.reward), result.reward, type(result.score), result.score) == (float, 0.5, float, 1.0)


def test_an_episode_cannot_end_in_both_ways():
    with pytest.raises(ContractError, match="at most one of terminated and truncated, got both"):
        StepResult(terminated=True, truncated=True)


@pytest.mark.parametrize(("terminated", "truncated"), [(False, False), (True, False), (False, True)])
def test_a_step_is_done_when_it_ends_the_episode_either_way(terminated, truncated):
    assert StepResult(terminated=terminated, truncated=truncated).done is (terminated or truncated)


def test_an_environment_that_reuses_its_info_dict_does_not_rewrite_earlier_turns():
    info = {"tries": 1.0}
    result = StepResult(info=info)
    info["tries"] = 2.0
    assert result.info == {"tries": 1.0}


def test_each_stop_reason_says_once_whether_it_terminated_or_truncated():
    odd = {StopReason.TERMINATED: (True, False), StopReason.ERROR: (False, False)}
    for reason in StopReason:
        assert (reason.terminated, reason.truncated) == odd.get(reason, (False, True))


def test_the_parameters_of_a_turn_keep_every_field_but_the_limits_and_the_seed():
    given = SamplingParams(0.5, 0.6, 7, 0.1, 50, 3, ("a",), (4,), 8)
    with_tag = SamplingParams(0.5, structural_tag="{}")
    fields = [each.name for each in dataclasses.fields(SamplingParams)]
    assert all(getattr(given, name) != getattr(SamplingParams(), name) for name in fields if name != "structural_tag")
    assert given.for_turn(2, room=20) == dataclasses.replace(given, max_tokens=20, seed=10)
    assert with_tag.for_turn(2, room=20) == dataclasses.replace(with_tag, max_tokens=20)
