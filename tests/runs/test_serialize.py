"""Trajectories as JSON: nothing is lost, and what JSON cannot hold has a documented form."""

import datetime
import json
import math
from array import array
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv._util.jsonable import jsonable
from agentenv.core.step_dict import parse_step
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import MAX_REWARD, BridgeKind, Completion, SamplingParams, StepResult, StopReason, Task
from agentenv.errors import ContractError, DataError
from agentenv.runs.records.lines import (
    decode_episode,
    decode_line,
    encode_line,
    trajectory_from_dict,
    trajectory_to_dict,
)

# Lone surrogates are text too; two that make a pair become one character in JSON.
texts = st.text(st.characters(exclude_categories=()), max_size=12).filter(
    lambda text: json.loads(json.dumps(text)) == text
)
numbers = st.floats(-MAX_REWARD, MAX_REWARD)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
ids = st.integers(0, 2**31 - 1)
messages = st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), min_size=1, max_size=2)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    max_tokens=st.none() | st.integers(1, 99),
    stop=st.lists(texts, max_size=2).map(tuple),
    stop_token_ids=st.lists(ids, max_size=2).map(tuple),
    seed=st.none() | st.integers(),
)
results = st.builds(
    StepResult,
    observation=texts | messages,
    reward=numbers,
    truncated=st.booleans(),
    score=st.none() | st.floats(0, 1),
    info=st.dictionaries(texts, numbers | texts, max_size=2),
    sampling=st.none() | sampling,
)
tasks = st.builds(
    Task,
    prompt=texts | messages,
    label=values,
    task_id=texts,
    metadata=st.dictionaries(texts, values, max_size=3),
    seed=st.none() | st.integers(),
)
errors = st.builds(EpisodeError, st.sampled_from(["infra", "env", "contract", "data"]), texts, texts, texts)


@st.composite
def completions(draw):
    num = draw(st.integers(1, 6))
    exactly = {"min_size": num, "max_size": num}
    return Completion(
        tuple(draw(st.lists(ids, **exactly))),
        draw(st.sampled_from(["stop", "length", "abort", "error", "repetition"])),
        draw(st.none() | st.integers() | texts),
        draw(st.none() | st.lists(st.floats(width=32), **exactly).map(tuple)),
        draw(st.just(()) | st.lists(st.integers(-1, 9), **exactly).map(tuple)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
    )


@st.composite
def trajectories(draw):
    trajectory = Trajectory(
        draw(tasks), 10_000, draw(texts), draw(texts), draw(st.integers(0, 9)), draw(st.none() | st.integers())
    )
    trajectory.prompt = draw(texts | messages)
    trajectory.tools = tuple(draw(st.lists(st.dictionaries(texts, values, max_size=2), max_size=2)))
    for segment in range(draw(st.integers(1, 2))):
        first = draw(st.lists(ids, min_size=1, max_size=4))
        if segment:
            trajectory.open_segment(first, cut=draw(st.booleans()))
        else:
            trajectory.append_observation(first)
        for _ in range(draw(st.integers(0, 3))):
            trajectory.append_turn(
                draw(completions()), draw(texts), draw(st.floats(0, 9)), began_s=draw(st.none() | st.floats(0, 9))
            )
            trajectory.turns[-1].num_retries = draw(st.integers(0, 3))
            if draw(st.booleans()):
                reply = draw(st.lists(ids, max_size=4))
                kind, num = draw(st.sampled_from(get_args(BridgeKind))), draw(st.integers(0, len(reply)))
                trajectory.append_observation(reply, bridge=kind, num_synthesized=num, cut=draw(st.booleans()))
            trajectory.set_result(replace(draw(results), truncated=False), draw(st.floats(0, 9)))
    if trajectory.turns and draw(st.booleans()):
        trajectory.turns[-1] = replace(trajectory.turns[-1], result=None)
        last = trajectory.turns[-1]
        trajectory.segments[last.segment].rewards[last.end - 1] = 0.0
    trajectory.wait_s, trajectory.began_s = draw(st.floats(0, 9)), draw(st.none() | st.floats(0, 2e9))
    if draw(st.booleans()):
        trajectory.finish(draw(st.sampled_from(StopReason)), draw(st.none() | errors))
    return trajectory


def facts(trajectory):
    """Everything in a trajectory, in a form that == compares, NaN included."""
    plain = [field.name for field in fields(Trajectory) if field.name != "segments"]
    arrays = [
        (s.token_ids, s.action_mask, s.logprobs.tobytes(), s.policy_versions, s.rewards.tobytes(), s.logprobs.typecode)
        for s in trajectory.segments
    ]
    return [getattr(trajectory, name) for name in plain], arrays


def canonical_nan(trajectory):
    # The bits of a NaN beyond its being one are not kept.
    for segment in trajectory.segments:
        segment.logprobs = array("f", [math.nan if math.isnan(value) else value for value in segment.logprobs])
    return trajectory


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(trajectories())
def test_a_trajectory_comes_back_from_its_line_as_it_was(trajectory):
    line = encode_line(trajectory)
    back = trajectory_from_dict(json.loads(decode_line(line)))
    assert facts(back) == facts(canonical_nan(trajectory))
    assert encode_line(back) == line
    assert line.isascii()
    assert line.index(b"\n") == len(line) - 1


def small():
    trajectory = Trajectory(Task("p", label=2), 100, "a/0", "a")
    trajectory.append_observation([1, 2])
    trajectory.append_turn(Completion((3, 4), logprobs=(-0.1, math.nan), policy_version=7), "x")
    trajectory.set_result(StepResult(reward=1.0, terminated=True))
    trajectory.finish(StopReason.TERMINATED)
    return trajectory


def test_a_line_is_plain_json_with_the_facts_where_readers_look():
    line = json.loads(encode_line(small()))
    assert list(line) == ["v", "crc", "episode"]
    assert line["v"] == 3
    episode = line["episode"]
    assert list(episode)[:2] == ["episode_id", "error"]
    assert (episode["episode_id"], episode["stop_reason"], episode["reward"]) == ("a/0", "terminated", 1.0)
    assert episode["segments"] == [
        {
            "token_ids": [1, 2, 3, 4],
            "action_spans": [[2, 4]],
            "logprobs": [-0.100000001, None],
            "policy_versions": [[7, 2]],
        }
    ]


def test_images_are_counted_not_written():
    trajectory = small()
    trajectory.task = replace(trajectory.task, images=(object(), object()))
    trajectory.turns[0] = replace(trajectory.turns[0], result=StepResult(reward=1.0, images=(object(),)))
    episode = trajectory_to_dict(trajectory)
    assert episode["task"]["num_images"] == 2
    assert episode["turns"][0]["result"]["num_images"] == 1
    assert trajectory_from_dict(episode).task.images == ()


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ((1, (2,)), [1, [2]]),
        ({1: "a", None: "b"}, {"1": "a", "None": "b"}),
        (b"caf\xc3\xa9 \xff", "café \\xff"),
        (b"x" * 2000, "<2000 bytes>"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (Decimal("1.50"), "1.50"),
        (StopReason.ABORTED, "aborted"),
        pytest.param(1 << 20_000, hex(1 << 20_000), id="huge"),
    ],
)
def test_values_outside_json_have_a_documented_form(value, form):
    assert json.loads(json.dumps(jsonable(value), allow_nan=False)) == form


def test_numpy_values_become_numbers_and_lists():
    numpy = pytest.importorskip("numpy")
    value = {"a": numpy.int64(3), "b": numpy.float32(0.5), "c": numpy.arange(3), "d": numpy.bool_(True), "e": numpy.nan}
    assert json.loads(json.dumps(jsonable(value))) == {"a": 3, "b": 0.5, "c": [0, 1, 2], "d": True, "e": "nan"}


def test_a_record_from_before_times_of_start_is_readable():
    values = trajectory_to_dict(small())
    del values["began_s"]
    for turn in values["turns"]:
        del turn["began_s"]
    back = trajectory_from_dict(values)
    assert (back.began_s, {turn.began_s for turn in back.turns}) == (None, {None})


def test_values_that_no_line_can_hold_are_a_data_error_that_names_the_episode():
    endless = []
    endless.append(endless)
    trajectory = small()
    trajectory.task = replace(trajectory.task, label=endless)
    with pytest.raises(DataError, match="episode a/0: expected values that JSON supports"):
        encode_line(trajectory)


@pytest.mark.parametrize(
    "change",
    [
        lambda episode: episode.pop("turns"),
        lambda episode: episode.update(stop_reason="bored"),
        lambda episode: episode["segments"][0].update(action_spans=[[2, 9]]),
        lambda episode: episode["segments"][0].update(logprobs=[0.0]),
        lambda episode: episode["segments"][0].update(token_ids=["x"]),
        lambda episode: episode["task"].update(colour="red"),
        lambda episode: episode["turns"][0]["result"].update(reward=None),
        lambda episode: episode["turns"][0].update(forced=[2]),
    ],
)
def test_values_that_are_not_a_trajectory_are_a_data_error(change):
    episode = trajectory_to_dict(small())
    change(episode)
    with pytest.raises(DataError, match="expected the values of a trajectory"):
        trajectory_from_dict(episode)


@pytest.mark.parametrize("forced", [None, (), (0, 1)])
def test_forced_tokens_are_read_back_and_free_actions_are_written_as_before(forced):
    trajectory = small()
    trajectory.turns[0].forced = forced
    values = json.loads(json.dumps(trajectory_to_dict(trajectory)))
    assert ("forced" in values["turns"][0]) == (forced is not None)
    (turn,) = trajectory_from_dict(values).turns
    assert turn.forced == forced
    assert turn.forced_places == [2 + index for index in forced or ()]


numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
odd = st.sampled_from(
    [
        numpy.bool_(True), numpy.int64(3), numpy.float32(0.5), numpy.str_("x"), numpy.array(2), numpy.array([2.5]),
        numpy.zeros(2), numpy.zeros(0), torch.tensor(True), torch.tensor(0.5), torch.tensor([1]), torch.zeros(2),
        torch.tensor(2.0, requires_grad=True), Fraction(1, 3), Decimal("1.5"), 10**400, -(10**400), 1 << 70, 1j, None,
        "False", "", b"x", math.nan, math.inf, [1], (), {}, {"a": 1}, object(), StopReason.ABORTED,
    ]
) | values  # fmt: skip
names = texts | st.integers() | st.none() | st.booleans()


@pytest.mark.parametrize("is_dict", [False, True])
@given(
    reward=odd, score=odd, terminated=odd | st.booleans(), truncated=odd | st.booleans(),
    info=st.dictionaries(names, odd, max_size=2),
    temperature=st.sampled_from([0.5, numpy.float32(0.5), torch.tensor(0.5)]),
)  # fmt: skip
def test_what_a_step_returns_is_refused_or_can_be_read_again(
    is_dict, reward, score, terminated, truncated, info, temperature
):
    sampling = SamplingParams(temperature=temperature)
    try:
        if is_dict:
            returned = {"rewards": reward, "scores": score, "done": terminated, "truncated": truncated,
                        "environment_feedback": "", "extra_logs": info, "sampling_params": sampling}  # fmt: skip
        else:
            returned = StepResult("", reward, terminated, truncated, score, info, sampling)
        result = parse_step(returned, "step")
    except ContractError:
        return
    trajectory = small()
    trajectory.set_result(result)
    read = decode_episode(decode_line(encode_line(trajectory))).turns[-1].result
    assert {type(result.terminated), type(result.truncated), type(result.reward)} == {bool, float}
    written = {
        key: str(float(v)) if isinstance(v, float) and not math.isfinite(v) else v for key, v in result.info.items()
    }
    assert replace(read, sampling=None) == replace(result, info=written, sampling=None)
    assert read.sampling.temperature == 0.5
