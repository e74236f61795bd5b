"""OpenRLHF's dicts: what is read, what is refused, what is given back, and the traps of its own loop that end here."""

import asyncio
import math
import sys
import types
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.step_dict import parse_step, scalar, to_sampling
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.setup import EpisodeKey
from agentenv.errors import ContractError, EngineError
from agentenv.interop.agent_files import OPENRLHF_NAMES
from agentenv.interop.openrlhf import AgentExecutor, ResponseDict, from_response, to_response
from agentenv.interop.openrlhf.shim import install_shim, register
from agentenv.testing.tokenizers import CharTokenizer

SAMPLING = SamplingParams()
STEP = {"rewards": 1.0, "environment_feedback": "go on", "done": False}


def torch_tensor(value):
    return pytest.importorskip("torch").tensor(value)


# --- parse_step: what a step may return ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1.0, 1.0),
        (-3, -3.0),
        (True, 1.0),
        (False, 0.0),
        ([0.5], 0.5),
        ((0.5,), 0.5),
        ([[0.5]], 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (np.array([[0.5]]), 0.5),
        (np.array([True]), 1.0),
    ],
    ids=repr,
)
def test_one_number_in_any_wrapping_is_a_reward_and_a_score(value, number):
    result = parse_step(STEP | {"rewards": value, "scores": value}, "Env.step")
    assert (result.reward, result.score) == (number, number)
    assert (type(result.reward), type(result.score)) == (float, float)


@pytest.mark.parametrize("value", [0.5, [0.5], [[0.5]], True, 3], ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_tensors_of_one_element_are_numbers(value, dtype):
    tensor = torch_tensor(value).to(getattr(pytest.importorskip("torch"), dtype))
    assert scalar(tensor, "x") == float(np.reshape(value, -1)[0])


WRONG_NUMBERS = [
    None, "1.0", "", [], [1.0, 2.0], {}, {"r": 1.0}, object(), 1j, math.nan, math.inf, -math.inf, np.array([1.0, 2.0]),
    np.array([]), np.array([math.nan]), np.array("1.0"), [None], ["1.0"], Fraction(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG_NUMBERS, ids=lambda value: f"{type(value).__name__}-{value}"[:22])
@pytest.mark.parametrize("key", ["rewards", "scores"])
def test_anything_but_one_finite_number_is_refused_by_name(key, value):
    if key == "scores" and value is None:
        assert parse_step(STEP | {"scores": None}, "Env.step").score is None
        return
    with pytest.raises(ContractError, match=rf"^Env\.step: {key}: expected one finite number, got "):
        parse_step(STEP | {key: value}, "Env.step")


def test_tensors_of_several_elements_are_refused():
    with pytest.raises(ContractError, match="expected one finite number"):
        parse_step(STEP | {"rewards": torch_tensor([1.0, 2.0])}, "Env.step")


@pytest.mark.parametrize("key", ["rewards", "environment_feedback", "done"])
def test_a_missing_key_is_named(key):
    value = {name: STEP[name] for name in STEP if name != key}
    with pytest.raises(ContractError, match=rf"^Env\.step: expected the keys .* Add \['{key}'\]"):
        parse_step(value, "Env.step")


@pytest.mark.parametrize("value", [None, "text", 1.0, (1.0, "", True, {}), [], True], ids=repr)
def test_anything_but_a_result_or_a_dict_is_refused(value):
    with pytest.raises(ContractError, match=rf"^Env\.step: expected a StepResult .* got {type(value).__name__}\."):
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


def test_done_without_truncated_terminates():
    assert parse_step(STEP | {"done": True}, "Env.step").terminated


@pytest.mark.parametrize("key", ["done", "truncated"])
@pytest.mark.parametrize("value", ["False", "yes", [], np.array([True, False]), {}], ids=repr)
def test_a_flag_that_is_not_a_boolean_is_refused(key, value):
    with pytest.raises(ContractError, match=rf"^Env\.step: {key}: "):
        parse_step(STEP | {key: value}, "Env.step")


@pytest.mark.parametrize("value", [None, 7, b"bytes", ["text"], [7], {"role": "user"}, 1.5], ids=repr)
def test_feedback_that_is_neither_text_nor_messages_is_refused(value):
    with pytest.raises(ContractError, match=r"^Env\.step: environment_feedback: expected text"):
        parse_step(STEP | {"environment_feedback": value}, "Env.step")


@pytest.mark.parametrize("value", ["", "text", [], [{"role": "tool", "content": "7"}]], ids=repr)
def test_feedback_is_text_or_messages(value):
    assert parse_step(STEP | {"environment_feedback": value}, "Env.step").observation == value


def test_logs_become_info_with_numbers_as_floats_and_text_as_text():
    logs = {"step": 2, "correct": True, "loss": np.array([0.5]), "note": "fine"}
    info = parse_step(STEP | {"extra_logs": logs}, "Env.step").info
    assert info == {"step": 2.0, "correct": 1.0, "loss": 0.5, "note": "fine"}
    assert type(info["step"]) is float


@pytest.mark.parametrize("logs", [[1], "text", 7, {"x": None}, {"x": [1, 2]}, {"x": math.nan}, {"x": {}}], ids=repr)
def test_logs_that_cannot_be_logged_are_refused(logs):
    with pytest.raises(ContractError, match=r"^Env\.step: extra_logs"):
        parse_step(STEP | {"extra_logs": logs}, "Env.step")


def test_no_logs_and_no_images_are_none():
    result = parse_step(STEP | {"extra_logs": None, "environment_images": None}, "Env.step")
    assert (result.info, result.images) == ({}, ())


def test_a_step_result_passes_through():
    result = StepResult("go on", reward=0.5)
    assert parse_step(result, "Env.step") is result


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


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_strings_come_as_none_one_or_many(stop, expected):
    params = VLLMParams()
    params.stop = stop
    assert to_sampling(params).stop == expected


def test_ours_and_none_stay_what_they_are():
    ours = SamplingParams(temperature=0.5)
    assert to_sampling(ours) is ours
    assert to_sampling(None) is None


@pytest.mark.parametrize("value", [{"temperature": 0.1}, "greedy", 7, []], ids=repr)
def test_invalid_sampling_parameters_are_refused_and_not_replaced_by_defaults(value):
    with pytest.raises(ContractError, match=r"sampling_params: expected SamplingParams, got "):
        parse_step(STEP | {"sampling_params": value}, "Env.step")


def test_sampling_parameters_out_of_range_break_the_contract():
    params = VLLMParams()
    params.temperature = -1.0
    with pytest.raises(ContractError, match=r"^Env\.step: SamplingParams\.temperature"):
        parse_step(STEP | {"sampling_params": params}, "Env.step")


# --- responses ------------------------------------------------------------------------------------------------------


def record(stop_reason=StopReason.TERMINATED, *, logprobs=(-0.5, -0.25), error=None, last=True):
    trajectory = Trajectory(Task("p", label="l", images=("i",)), 64)
    trajectory.append_observation([1, 2])
    trajectory.append_turn(Completion((3, 4), logprobs=logprobs), "ab")
    trajectory.set_result(StepResult("o", reward=0.25, score=0.5, info={"first": 1.0}))
    trajectory.append_observation([5])
    trajectory.append_turn(Completion((6,), logprobs=logprobs and (-2.0,)), "c")
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
@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_every_key_is_there_no_matter_what_ended_the_episode(stop_reason, num_turns):
    trajectory = record(stop_reason, last=num_turns == 2)
    if num_turns == 0:
        trajectory = Trajectory(Task("p"), 64)
        trajectory.finish(stop_reason)
    response = to_response(trajectory)
    assert response.keys() == ResponseDict.__annotations__.keys()
    assert response["truncated"] == stop_reason.truncated


def test_a_failed_episode_has_a_reward_of_none_and_never_of_zero():
    response = to_response(record(StopReason.ERROR, error=EpisodeError("infra", "X", "down")))
    assert (response["reward"], response["scores"]) == (None, None)


def test_a_missing_logprob_leaves_them_all_out():
    assert to_response(record(logprobs=(-0.5, math.nan)))["rollout_log_probs"] is None
    assert to_response(record(logprobs=None))["rollout_log_probs"] is None


def test_without_a_score_the_reward_stands_for_it():
    trajectory = Trajectory(Task("p"), 8)
    trajectory.append_observation([1])
    trajectory.append_turn(Completion((2,)), "")
    trajectory.set_result(StepResult(reward=0.25))
    trajectory.finish(StopReason.TERMINATED)
    assert to_response(trajectory)["scores"] == 0.25


def rebuild(response, max_length=64):
    return from_response(response, Task("p", label="l"), max_length=max_length, decode=str)


spans = st.lists(
    st.tuples(st.lists(st.integers(0, 99), max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(spans, st.lists(st.integers(0, 99), max_size=3), st.floats(-2, 2), st.floats(0, 1), st.booleans(), st.booleans())
def test_a_response_read_back_is_the_same_response(turns, tail, reward, score, truncated, has_logprobs):
    ids, ranges, logprobs = [7], [], [0.0]
    for observation, action in turns:
        ids += observation
        ranges.append((len(ids), len(ids) + len(action)))
        ids += action
        logprobs += [0.0] * len(observation) + [-0.5] * len(action)
    response = {
        "prompt": "p", "label": "l", "observation_tokens": [*ids, *tail], "action_ranges": ranges,
        "rollout_log_probs": [*logprobs, *([0.0] * len(tail))] if has_logprobs else None,
        "reward": reward, "scores": score, "truncated": truncated, "extra_logs": {"x": 1.0},
        "images": None, "mm_train_inputs": None,
    }  # fmt: skip
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
        {"action_ranges": [(-1, 2)]},
        {"action_ranges": [(2, 2)]},
        {"action_ranges": [(0, 2)]},
        {"action_ranges": [1, 2]},
        {"action_ranges": None},
        {"action_ranges": [("a", "b")]},
        {"rollout_log_probs": [0.0]},
        {"rollout_log_probs": [0.0, None, 0.0, None]},
        {"observation_tokens": ["a", "b", "c", "d"]},
        {"observation_tokens": None},
        {"reward": None, "scores": 1.0},
        {"reward": "1"},
        {"reward": math.nan},
        {"scores": math.inf},
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
    install_shim(OPENRLHF_NAMES)
    from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, logger

    assert AgentExecutorBase is MultiTurnAgentExecutor is AgentExecutor
    assert issubclass(AgentInstanceBase, AgentInstance)
    assert logger.name == "openrlhf.utils.agent"


@pytest.mark.usefixtures("no_openrlhf")
def test_installing_the_shim_twice_keeps_the_first():
    install_shim(OPENRLHF_NAMES)
    first = sys.modules["openrlhf.utils.agent"]
    install_shim(dict.fromkeys(OPENRLHF_NAMES, object))
    assert sys.modules["openrlhf.utils.agent"] is first


@pytest.mark.usefixtures("no_openrlhf")
def test_the_shim_leaves_an_imported_openrlhf_alone():
    real = types.ModuleType("openrlhf")
    sys.modules["openrlhf"] = real
    install_shim(OPENRLHF_NAMES)
    assert sys.modules["openrlhf"] is real
    assert "openrlhf.utils.agent" not in sys.modules


@pytest.mark.usefixtures("no_openrlhf")
def test_the_shim_leaves_an_installed_openrlhf_alone(tmp_path, monkeypatch):
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "openrlhf" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    install_shim(OPENRLHF_NAMES)
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


@pytest.mark.usefixtures("no_openrlhf")
def test_register_does_nothing_without_openrlhf():
    register(AgentExecutor)
    assert "openrlhf" not in sys.modules


# --- the traps of OpenRLHF's own loop, by their number in the project's list ------------------------------------------


class Env(AgentInstance):
    """Answers with a dict, as OpenRLHF's environments do."""

    def __init__(self, *replies, prompt=None):
        self.replies, self.prompt, self.seen = replies, prompt, []

    async def reset(self, states):
        return states if self.prompt is None else {"observation": self.prompt}

    async def step(self, states):
        self.seen.append(states)
        reply = self.replies[min(len(self.seen), len(self.replies)) - 1]
        return reply(states) if callable(reply) else reply


def reply(feedback="", *, rewards=0.0, done=False, **more):
    return {"rewards": rewards, "environment_feedback": feedback, "done": done, **more}


async def play(env, script=("hello",), *, engine=None, max_length=200, max_turns=4, sampling=SAMPLING):
    tokenizer = CharTokenizer()
    engine = engine or ScriptedEngine(script, tokenizer)

    async def make():
        return env

    limits = Limits(max_length=max_length, max_turns=max_turns)
    options = {"engine": engine, "chat": Chat(tokenizer), "sampling": sampling, "limits": limits, "key": EpisodeKey()}
    return await run_episode(make, Task("prompt", label="l"), **options), engine


async def test_trap_01_siblings_keep_their_own_prompts():
    shared = SamplingParams()
    _, short = await play(Env(reply(done=True)), sampling=shared)
    _, long = await play(Env(reply(done=True), prompt="prompt" + "x" * 50), sampling=shared)
    assert [len(engine.requests[0].prompt) for engine in (short, long)] == [6, 56]
    assert [engine.requests[0].sampling.max_tokens for engine in (short, long)] == [194, 144]


async def test_trap_02_a_temperature_set_by_one_episode_stays_in_it():
    engine, shared = ScriptedEngine(["hello"], CharTokenizer()), SamplingParams()
    cool = VLLMParams()
    await play(Env(reply("a", sampling_params=cool), reply(done=True)), engine=engine, sampling=shared)
    await play(Env(reply("a"), reply(done=True)), engine=engine, sampling=shared)
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 0.7, 1.0, 1.0]


async def test_trap_02_handing_the_sampling_parameters_back_changes_nothing():
    env = Env(lambda states: reply("a", sampling_params=states["sampling_params"]))
    _, engine = await play(env, sampling=SamplingParams(max_tokens=7, seed=1))
    assert [(r.sampling.max_tokens, r.sampling.seed) for r in engine.requests] == [(7, 1), (7, 2), (7, 3), (7, 4)]


async def test_trap_03_max_tokens_is_a_cap_of_every_turn():
    trajectory, _ = await play(Env(reply()), ["x" * 99], sampling=SamplingParams(max_tokens=8))
    assert [turn.end - turn.start for turn in trajectory.turns] == [8, 8, 8, 8]


async def test_trap_04_a_cap_as_large_as_the_room_still_generates():
    trajectory, engine = await play(Env(reply(done=True)), max_length=20, sampling=SamplingParams(max_tokens=20))
    assert (engine.requests[0].sampling.max_tokens, len(trajectory.turns)) == (14, 1)


async def test_trap_05_empty_actions_and_empty_feedback_come_to_an_end():
    trajectory, _ = await play(Env(reply("")), [""], max_turns=3)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)


async def test_trap_06_the_environment_sees_why_a_generation_ended():
    env = Env(reply(done=True))
    await play(env, ["x" * 99], sampling=SamplingParams(max_tokens=8))
    assert env.seen[0]["finish_reason"] == "length"


async def test_trap_07_the_observation_text_is_the_decoded_tokens_with_the_terminator():
    env = Env(reply("a"), reply(done=True))
    trajectory, _ = await play(env)
    tokens = trajectory.token_ids.tolist()[: trajectory.turns[1].start]
    assert env.seen[1]["observation_text"] == CharTokenizer().decode(tokens) == "prompthello<|im_end|>a"


async def test_trap_09_feedback_after_the_last_step_is_not_appended():
    trajectory, _ = await play(Env(reply("y" * 500, done=True)))
    assert (trajectory.num_tokens, trajectory.truncated) == (len("prompthello") + 1, False)


async def test_trap_10_and_11_feedback_without_room_truncates_and_says_so():
    trajectory, _ = await play(Env(reply("y" * 500, rewards=0.5)))
    response = to_response(trajectory)
    assert (response["truncated"], response["reward"]) == (True, 0.5)
    assert trajectory.stop_reason is StopReason.MAX_LENGTH


async def test_trap_12_logprobs_of_the_wrong_length_are_refused():
    trajectory, _ = await play(Env(reply()), [Completion((5, 6), logprobs=(-0.5,))])
    assert (trajectory.error.kind, trajectory.error.type) == ("infra", EngineError.__name__)


async def test_trap_14_a_prompt_longer_than_the_context_is_refused_and_not_cut():
    trajectory, engine = await play(Env(reply(), prompt="x" * 300))
    assert (trajectory.error.kind, engine.requests) == ("data", [])


async def test_trap_17_an_environment_that_raises_does_not_take_its_siblings_along():
    def boom(_):
        raise ValueError("no")

    engine = ScriptedEngine(["hello"], CharTokenizer(), latency_s=0.001)
    done = await asyncio.gather(*(play(Env(step), engine=engine) for step in (boom, reply(rewards=1.0, done=True))))
    assert [trajectory.reward for trajectory, _ in done] == [None, 1.0]


async def test_trap_24_rewards_are_floats_even_where_environments_give_integers():
    trajectory, _ = await play(Env(reply(rewards=1, done=True)))
    assert type(to_response(trajectory)["reward"]) is float


async def test_trap_25_an_episode_without_an_action_has_no_reward():
    trajectory, _ = await play(Env(reply()), [Completion((), "abort")])
    assert (to_response(trajectory)["reward"], to_response(trajectory)["action_ranges"]) == (None, [])


async def test_trap_26_no_action_is_at_position_zero():
    trajectory, engine = await play(Env(reply(), prompt=""))
    assert (trajectory.error.kind, engine.requests) == ("data", [])


async def test_trap_27_no_action_is_cut_after_its_reward_was_placed():
    trajectory, _ = await play(Env(reply(rewards=1.0)), ["x" * 99], max_length=50)
    assert trajectory.turns[-1].end == trajectory.num_tokens == 50
    assert trajectory.segments[0].rewards[49] == 1.0


async def test_trap_30_every_turn_keeps_its_own_reward_and_the_sum():
    trajectory, _ = await play(Env(reply("a", rewards=0.25), reply(rewards=0.5, done=True)))
    assert [turn.result.reward for turn in trajectory.turns] == [0.25, 0.5]
    assert to_response(trajectory)["reward"] == 0.75


def test_sampling_that_would_lose_a_penalty_is_refused():
    """Trap: #1165, sampling that neither engine nor trainer models."""
    with pytest.raises(ContractError, match="repetition_penalty"):
        to_sampling(SimpleNamespace(temperature=1.0, repetition_penalty=1.1))
    assert to_sampling(SimpleNamespace(temperature=0.5, repetition_penalty=1.0, n=1)).temperature == 0.5


ADVICE = {
    "rewards": ({"rewards": "x"}, "raise InfraError if the value is unknown."),
    "scores": ({"scores": "x"}, "Leave it out where there is none."),
    "done": ({"done": "x"}, "Return True or False."),
    "truncated": ({"truncated": float("nan")}, "Return True or False."),
    "extra_logs": ({"extra_logs": {"a": [1, 2]}}, "Leave it out."),
}


@pytest.mark.parametrize("key", ADVICE)
def test_the_advice_fits_the_value(key):
    wrong, advice = ADVICE[key]
    with pytest.raises(ContractError) as caught:
        parse_step({"rewards": 1.0, "environment_feedback": "", "done": True} | wrong, "Env.step")
    assert str(caught.value).endswith(advice)
    assert ("InfraError" in str(caught.value)) == (key == "rewards")


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
