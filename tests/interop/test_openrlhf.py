"""OpenRLHF's dicts: what is read, what is refused, and what is given back."""

import math
import re
import sys
import types
from fractions import Fraction

import numpy as np
import pytest
import torch

from agentenv.core.agent import AgentInstance
from agentenv.core.step_dict import parse_step, to_sampling
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, SamplingParams, StepResult, StopReason, Task
from agentenv.errors import ContractError
from agentenv.interop.agent_files import OPENRLHF_NAMES
from agentenv.interop.openrlhf import AgentExecutor, ResponseDict, from_response, to_response
from agentenv.interop.openrlhf.shim import openrlhf_stand_in

STEP = {"rewards": 1.0, "environment_feedback": "go on", "done": False}


# --- parse_step: what a step may return ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1.0, 1.0),
        (True, 1.0),
        ((0.5,), 0.5),
        ([[0.5]], 0.5),
        (np.int64(2), 2.0),
        (np.array([[0.5]]), 0.5),
        (torch.tensor(3.0, dtype=torch.float64), 3.0),
        (torch.tensor([[0.5]], dtype=torch.bfloat16), 0.5),
    ],
    ids=repr,
)
def test_one_number_in_any_wrapping_is_a_reward_and_a_score(value, number):
    result = parse_step(STEP | {"rewards": value, "scores": value}, "Env.step")
    assert (result.reward, result.score) == (number, number)
    assert (type(result.reward), type(result.score)) == (float, float)


WRONG_NUMBERS = [
    None, "1.0", "", [], [1.0, 2.0], {}, {"r": 1.0}, object(), 1j, math.nan, math.inf, -math.inf, np.array([1.0, 2.0]),
    np.array([]), np.array([math.nan]), np.array("1.0"), [None], ["1.0"], Fraction(1, 2), torch.tensor([1.0, 2.0]),
]  # fmt: skip


@pytest.mark.parametrize("key", ["rewards", "scores"])
def test_anything_but_one_finite_number_is_refused_by_name(key):
    for value in WRONG_NUMBERS[key == "scores" :]:
        with pytest.raises(ContractError, match=rf"^Env\.step: {key}: expected one finite number, got "):
            parse_step(STEP | {key: value}, "Env.step")
    assert parse_step(STEP | {"scores": None}, "Env.step").score is None


@pytest.mark.parametrize("key", ["rewards", "environment_feedback", "done"])
def test_a_missing_key_is_named(key):
    value = {name: STEP[name] for name in STEP if name != key}
    with pytest.raises(ContractError, match=rf"^Env\.step: expected the keys .* Add \['{key}'\]"):
        parse_step(value, "Env.step")


@pytest.mark.parametrize(
    ("done", "truncated", "expected"),
    [
        (False, False, (False, False)),
        (True, False, (True, False)),
        (True, True, (False, True)),
        (False, True, (False, True)),
        (None, None, (False, False)),
        (1, 0, (True, False)),
        (np.bool_(True), np.bool_(False), (True, False)),
        (np.array([True]), [False], (True, False)),
    ],
    ids=repr,
)
def test_done_terminates_unless_it_was_truncated(done, truncated, expected):
    result = parse_step(STEP | {"done": done, "truncated": truncated}, "Env.step")
    assert (result.terminated, result.truncated) == expected


@pytest.mark.parametrize("key", ["done", "truncated"])
@pytest.mark.parametrize("value", ["False", "yes", [], np.array([True, False]), {}], ids=repr)
def test_a_flag_that_is_not_a_boolean_is_refused(key, value):
    with pytest.raises(ContractError, match=rf"^Env\.step: {key}: "):
        parse_step(STEP | {key: value}, "Env.step")


@pytest.mark.parametrize("value", [None, 7, b"bytes", ["text"], [7], {"role": "user"}, 1.5], ids=repr)
def test_feedback_that_is_neither_text_nor_messages_is_refused(value):
    with pytest.raises(ContractError, match=r"^Env\.step: environment_feedback: expected (text|messages)"):
        parse_step(STEP | {"environment_feedback": value}, "Env.step")


def test_logs_become_info_with_numbers_as_floats_and_text_as_text():
    logs = {"step": 2, "correct": True, "loss": np.array([0.5]), "first": torch.tensor([[3.0], [4.0]]), "note": "fine"}
    info = parse_step(STEP | {"extra_logs": logs}, "Env.step").info
    assert info == {"step": 2.0, "correct": 1.0, "loss": 0.5, "first": 3.0, "note": "fine"}
    assert type(info["step"]) is float
    nothing = parse_step(STEP | {"extra_logs": None, "environment_images": None}, "Env.step")
    assert (nothing.info, nothing.images) == ({}, ())


@pytest.mark.parametrize(
    "logs", [[1], "text", 7, {"x": None}, {"x": [1, 2]}, {"x": math.nan}, {"x": {}}, {"x": torch.tensor([])}], ids=repr
)
def test_logs_that_cannot_be_logged_are_refused(logs):
    with pytest.raises(ContractError, match=r"^Env\.step: extra_logs"):
        parse_step(STEP | {"extra_logs": logs}, "Env.step")


def test_the_error_of_a_log_shows_the_list_as_it_is():
    with pytest.raises(ContractError, match=re.escape("extra_logs['x']: expected one finite number, got ['40']. ")):
        parse_step(STEP | {"extra_logs": {"x": ["40"]}}, "Env.step")


# --- sampling parameters --------------------------------------------------------------------------------------------


class VLLMParams:
    """The part of vLLM's SamplingParams that an environment may hand back."""

    temperature, top_p, top_k, min_p, max_tokens, min_tokens, seed = 0.7, 0.9, -1, 0.05, 32, 4, 13
    stop, stop_token_ids, n, logprobs = ["END", "\n\n"], [5, 6], 1, 0


def test_vllms_sampling_parameters_become_ours():
    assert to_sampling(VLLMParams()) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=0, min_p=0.05, max_tokens=32, min_tokens=4,
        stop=("END", "\n\n"), stop_token_ids=(5, 6), seed=13,
    )  # fmt: skip
    for stop, expected in ((None, ()), ("END", ("END",)), ([], ())):
        assert to_sampling(type("Params", (VLLMParams,), {"stop": stop})()).stop == expected
    ours = SamplingParams(temperature=0.5)
    assert (to_sampling(ours), to_sampling(None)) == (ours, None)


@pytest.mark.parametrize("value", [{"temperature": 0.1}, "greedy", 7, []], ids=repr)
def test_invalid_sampling_parameters_are_refused_and_not_replaced_by_defaults(value):
    with pytest.raises(ContractError, match=r"sampling_params: expected SamplingParams, got "):
        parse_step(STEP | {"sampling_params": value}, "Env.step")


def test_a_penalty_that_agentenv_does_not_sample_with_is_refused():
    with pytest.raises(ContractError, match=r"supports, got {'repetition_penalty': 1.1}"):
        to_sampling(type("Params", (VLLMParams,), {"repetition_penalty": 1.1})())


def test_sampling_parameters_out_of_range_break_the_contract():
    params = VLLMParams()
    params.temperature = -1.0
    with pytest.raises(ContractError, match=r"^Env\.step: SamplingParams\.temperature"):
        parse_step(STEP | {"sampling_params": params}, "Env.step")


# --- responses ------------------------------------------------------------------------------------------------------


def record(stop_reason=StopReason.TERMINATED, *, logprobs=(-0.5, -0.25), error=None, last=True, finish="stop"):
    trajectory = Trajectory(Task("p", label="l", images=("i",)), 64)
    trajectory.append_observation([1, 2])
    trajectory.append_turn(Completion((3, 4), logprobs=logprobs), "ab")
    trajectory.set_result(StepResult("o", reward=0.25, score=0.5, info={"first": 1.0}))
    trajectory.append_observation([5])
    trajectory.append_turn(Completion((6,), logprobs=logprobs and (-2.0,), finish_reason=finish), "c")
    if last:
        trajectory.set_result(StepResult(reward=0.5, score=1.0, info={"tries": 2.0, "note": "text"}))
    trajectory.finish(stop_reason, error)
    return trajectory


def test_a_response_is_what_the_trainer_reads():
    assert to_response(record()) == {
        "prompt": "p",
        "label": "l",
        "observation_tokens": [1, 2, 3, 4, 5, 6],
        "action_ranges": [(2, 4), (5, 6)],
        "rollout_log_probs": [0.0, 0.0, -0.5, -0.25, 0.0, -2.0],
        "reward": 0.75,
        "scores": 1.0,
        "truncated": False,
        "extra_logs": {"tries": 2.0},
        "images": ["i"],
        "mm_train_inputs": None,
    }


@pytest.mark.parametrize("stop_reason", StopReason)
def test_every_key_is_there_no_matter_what_ended_the_episode(stop_reason):
    without_turns = Trajectory(Task("p"), 64)
    without_turns.finish(stop_reason)
    cut = record(stop_reason, finish="length")
    for trajectory in (without_turns, record(stop_reason, last=False), record(stop_reason), cut):
        response = to_response(trajectory)
        assert response.keys() == ResponseDict.__annotations__.keys()
        assert response["truncated"] is (trajectory is cut), "as in OpenRLHF: the token limit cut the last action"


def test_a_failed_episode_has_a_reward_of_none_and_never_of_zero():
    response = to_response(record(StopReason.ERROR, error=EpisodeError("infra", "X", "down")))
    assert (response["reward"], response["scores"]) == (None, None)


def test_a_missing_logprob_leaves_them_all_out():
    assert to_response(record(logprobs=(-0.5, math.nan)))["rollout_log_probs"] is None
    assert to_response(record(logprobs=None))["rollout_log_probs"] is None


def rebuild(response, max_length=64):
    return from_response(response, Task("p", label="l"), max_length=max_length, decode=str)


@pytest.mark.parametrize("change", [{}, {"rollout_log_probs": None}, {"truncated": True}], ids=repr)
def test_a_response_read_back_is_the_same_response(change):
    last = {"observation_tokens": [1, 2, 3, 4, 5, 6, 7], "rollout_log_probs": [0.0, 0.0, -0.5, -0.25, 0.0, -2.0, 0.0]}
    response = to_response(record()) | last | {"images": None} | change
    assert to_response(rebuild(response)) == response


def test_the_reward_of_a_response_stands_on_its_last_turn():
    trajectory = rebuild(to_response(record()))
    assert trajectory.segments[0].rewards.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 0.75]


def test_a_response_longer_than_the_limit_is_kept_whole():
    trajectory = rebuild(to_response(record()), max_length=3)
    assert (trajectory.num_tokens, trajectory.max_length) == (6, 6)


RESPONSE = {"observation_tokens": [1, 2, 3, 4], "action_ranges": [(1, 2), (3, 4)], "reward": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"action_ranges": [(3, 4), (1, 2)]},
        {"action_ranges": [(1, 3), (2, 4)]},
        {"action_ranges": [(1, 5)]},
        {"action_ranges": [(2, 2)]},
        {"action_ranges": [("a", "b")]},
        {"rollout_log_probs": [0.0]},
        {"observation_tokens": None},
        {"reward": None, "scores": 1.0},
        {"reward": math.nan},
        {"extra_logs": [1]},
    ],
    ids=repr,
)
def test_a_response_that_does_not_fit_itself_breaks_the_contract(change):
    with pytest.raises(ContractError, match=r"^AgentExecutor\.execute: "):
        rebuild(RESPONSE | change)


@pytest.mark.parametrize("key", ["observation_tokens", "action_ranges"])
def test_a_response_without_its_tokens_is_refused_by_name(key):
    with pytest.raises(ContractError, match=rf"got one without \['{key}'\]"):
        rebuild({name: RESPONSE[name] for name in RESPONSE if name != key})


# --- the module that stands in for OpenRLHF ---------------------------------------------------------------------------


@pytest.fixture
def no_openrlhf():
    """As if nobody had imported OpenRLHF; what the test leaves behind is taken away again."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "openrlhf"}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "openrlhf"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.usefixtures("no_openrlhf")
def test_the_shim_offers_the_names_that_agent_files_import():
    with openrlhf_stand_in(OPENRLHF_NAMES):
        pass
    from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, logger

    assert AgentExecutorBase is MultiTurnAgentExecutor is AgentExecutor
    assert issubclass(AgentInstanceBase, AgentInstance)
    assert logger.name == "openrlhf.utils.agent"


@pytest.mark.usefixtures("no_openrlhf")
def test_the_shim_leaves_an_imported_openrlhf_alone():
    real = types.ModuleType("openrlhf")
    sys.modules["openrlhf"] = real
    with openrlhf_stand_in(OPENRLHF_NAMES):
        assert "openrlhf.utils.agent" in sys.modules
    assert sys.modules["openrlhf"] is real
    assert "openrlhf.utils.agent" not in sys.modules


@pytest.mark.usefixtures("no_openrlhf")
def test_the_shim_leaves_an_installed_openrlhf_alone(tmp_path, monkeypatch):
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "openrlhf" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with openrlhf_stand_in(OPENRLHF_NAMES):
        assert "openrlhf.utils.agent" in sys.modules
    assert "openrlhf" not in sys.modules


@pytest.mark.usefixtures("no_openrlhf")
def test_openrlhfs_own_check_accepts_every_subclass_of_our_executor():
    from abc import ABC

    agent = types.ModuleType("openrlhf.utils.agent")
    agent.AgentExecutorBase = type("AgentExecutorBase", (ABC,), {})
    sys.modules["openrlhf.utils.agent"] = agent
    assert not issubclass(AgentExecutor, agent.AgentExecutorBase)
    assert issubclass(type("Ours", (AgentExecutor,), {}), agent.AgentExecutorBase)
    assert not issubclass(AgentExecutor, agent.AgentExecutorBase)


def test_what_a_constraint_forced_is_in_no_action_range():
    made = Trajectory(Task("p"), 32)
    made.append_observation([1, 2])
    made.append_turn(Completion((3, 4, 5, 6), logprobs=(0.0,) * 4, forced=(0, 2)), "a")
    made.set_result(StepResult(reward=1.0))
    made.append_observation([7])
    made.append_turn(Completion((8, 9), logprobs=(0.0,) * 2, forced=(1,)), "a")
    made.set_result(StepResult(terminated=True))
    made.finish(StopReason.TERMINATED)
    assert to_response(made)["action_ranges"] == [(3, 4), (5, 6), (7, 8)]
