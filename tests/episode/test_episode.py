"""The loop: what holds for every script, tokenizer, limit and failure.

The numbers of invariants in test names are those of the project's list of token-fidelity invariants.
"""

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from agentenv._util.calls import create
from agentenv._util.paths import PACKAGE
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.tool_calls import ToolCall
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.setup import EpisodeKey
from agentenv.errors import ConfigError, ContractError, InfraError, MissingDependency, RunStopped
from agentenv.rewards.grading import add_usage
from agentenv.testing.tokenizers import ByteFallbackTokenizer, CharTokenizer, MergingTokenizer
from agentenv.tools import ParsedAction, answer_calls
from tests.waits import until

ROOT = Path(__file__).parents[2]
TASK = Task("Q: ")
KEY = EpisodeKey("task-0/3", "task-0", attempt=1, seed=11)
GO_ON, END = StepResult("more"), StepResult(reward=1.0, score=1.0, terminated=True)


class Scripted(AgentInstance):
    """Answers from a list (the last answer repeats); an exception is raised, a callable called with the states."""

    def __init__(self, *steps, prompt=None, word=None, on_close=None):
        self.steps, self.prompt, self.word, self.on_close = steps, prompt, word, on_close
        self.seen, self.truncations, self.num_closed, self.reset_states = [], [], 0, None

    async def reset(self, states):
        self.reset_states = states
        return await answer(self.prompt or states, states)

    async def step(self, states):
        self.seen.append(states)
        return await answer(self.steps[min(len(self.seen), len(self.steps)) - 1], states)

    async def on_truncate(self, states):
        self.truncations.append(states)
        return await answer(self.word, states)

    async def close(self):
        self.num_closed += 1
        await answer(self.on_close, None)


async def answer(value, states):
    if isinstance(value, BaseException):
        raise value
    value = value(states) if callable(value) else value
    return await value if asyncio.iscoroutine(value) else value


async def forever(_):
    await asyncio.sleep(3600)


async def play(agent, script=("hello",), *, task=TASK, tokenizer=None, engine=None, **options):
    """Run one episode of an instance (or of a factory of instances); gives its record and its engine."""
    tokenizer = tokenizer or CharTokenizer()
    engine = engine or ScriptedEngine(script, tokenizer)

    async def make():
        return await agent() if callable(agent) else agent

    options = {"sampling": SamplingParams(), "limits": Limits(max_length=400, max_turns=4), "key": KEY} | options
    trajectory = await run_episode(make, task, engine=engine, chat=Chat(tokenizer), **options)
    return trajectory, engine


@pytest.mark.parametrize("tokenizer_of", [CharTokenizer, MergingTokenizer, ByteFallbackTokenizer])
async def test_the_record_of_a_chat_is_prompt_action_reply_action(tokenizer_of):
    steps = StepResult([{"role": "user", "content": "again"}], reward=0.5), END
    task, tokenizer = Task([{"role": "user", "content": "hi"}]), tokenizer_of()
    trajectory, _ = await play(Scripted(*steps), ["one", "two"], task=task, tokenizer=tokenizer)
    assert tokenizer.decode(trajectory.token_ids.tolist()) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )


async def test_trailing_observations_are_dropped_when_the_episode_ends():
    trajectory, _ = await play(Scripted(replace(END, observation="too late")))
    assert trajectory.turns[-1].end == trajectory.num_tokens


async def test_an_action_is_kept_when_its_bytes_are_not_whole_character():
    tokenizer = ByteFallbackTokenizer()
    half = tokenizer.encode("🙂")[:2]
    trajectory, _ = await play(Scripted(END), [half], tokenizer=tokenizer)
    assert trajectory.token_ids.tolist()[-2:] == half


async def test_an_action_that_encodes_differently_is_kept_as_sampled():
    tokenizer = MergingTokenizer()
    apart = [*tokenizer.encode("1"), *tokenizer.encode("2")]
    assert tokenizer.encode("12") != apart
    trajectory, _ = await play(Scripted(GO_ON, END), [apart], tokenizer=tokenizer)
    assert [list(trajectory.token_ids[t.start : t.end]) for t in trajectory.turns] == [apart, apart]


async def test_the_work_with_the_tokenizer_is_linear_in_the_tokens():
    class Counting(CharTokenizer):
        work = 0

        def encode(self, text, **options):
            ids = super().encode(text, **options)
            self.work += len(ids)
            return ids

        def decode(self, token_ids, **options):
            self.work += len(token_ids)
            return super().decode(token_ids, **options)

    tokenizer = Counting()
    agent = Scripted(StepResult([{"role": "user", "content": "next"}]))
    engine, limits = ScriptedEngine(["word"], CharTokenizer()), Limits(max_length=100_000, max_turns=200)
    trajectory, _ = await play(agent, tokenizer=tokenizer, engine=engine, limits=limits)
    assert len(trajectory.turns) == 200
    assert tokenizer.work <= 4 * trajectory.num_tokens


# --- what the two sides see ---------------------------------------------------------------------------------------


async def test_ids_of_no_model_with_this_tokenizer_are_an_engine_error():
    class Sized(CharTokenizer):
        def __len__(self):
            return 300

    trajectory, _ = await play(Scripted(END), [Completion((1_000_000,))], tokenizer=Sized())
    assert (trajectory.error.kind, trajectory.error.type) == ("infra", "EngineError")
    assert "vocabulary, got 1000000" in trajectory.error.message


async def test_a_step_sees_the_turn_it_judges():
    agent = Scripted(GO_ON, END)
    task = Task("Q: ", label="42", metadata={"level": 3})
    trajectory, _ = await play(agent, ["one", "two"], task=task, limits=Limits(max_length=100))
    second = agent.seen[1]
    assert second == {
        "observation_text": "Q: one<|im_end|>more",
        "action_text": "two",
        "label": "42",
        "sampling_params": SamplingParams(),
        "action_ids": [*CharTokenizer().encode("two"), 0],
        "finish_reason": "stop",
        "turn_index": 1,
        "tokens_left": 100 - trajectory.num_tokens,
        "metadata": {"level": 3},
        "seed": 11,
    }


async def test_reset_sees_the_task_and_the_seed_of_the_episode():
    agent = Scripted(END)
    await play(agent, task=Task("Q: ", label="42", metadata={"level": 3}, images=("i",)))
    expected = {"observation": "Q: ", "label": "42", "metadata": {"level": 3}, "images": ("i",), "seed": 11}
    assert agent.reset_states == {**expected, "renders_tools": True}


async def test_images_of_a_task_that_no_one_reads_are_an_error():
    class Asks(AgentInstance):
        async def step(self, states):
            return END

    done, engine = await play(Asks(), task=Task("Q: ", images=("i",)))
    assert (done.error.kind, done.error.where) == ("data", "reset")
    assert engine.requests == []


async def test_a_cut_action_is_shown_whole_and_as_cut():
    agent = Scripted(END)
    await play(agent, ["abcdef"], sampling=SamplingParams(max_tokens=3))
    assert (agent.seen[0]["action_text"], agent.seen[0]["finish_reason"]) == ("abc", "length")


async def test_every_turn_may_sample_its_cap_and_not_the_rest_of_the_room():
    agent, sampling = Scripted(StepResult("")), SamplingParams(max_tokens=10)
    _, engine = await play(agent, ["x" * 50], sampling=sampling, limits=Limits(max_length=28, max_turns=9))
    assert [request.sampling.max_tokens for request in engine.requests] == [10, 10, 5]


async def test_the_minimum_of_tokens_never_passes_the_room():
    sampling = SamplingParams(min_tokens=50)
    _, engine = await play(Scripted(END), sampling=sampling, limits=Limits(max_length=10))
    assert (engine.requests[0].sampling.min_tokens, engine.requests[0].sampling.max_tokens) == (7, 7)


async def test_the_sampling_seed_and_the_request_id_vary_by_turn():
    _, engine = await play(Scripted(GO_ON, GO_ON, END), sampling=SamplingParams(seed=7))
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9]
    assert [request.request_id for request in engine.requests] == ["task-0/3/0", "task-0/3/1", "task-0/3/2"]


async def test_the_record_says_when_the_episode_and_each_request_began():
    earlier = time.time()
    trajectory, _ = await play(Scripted(GO_ON, GO_ON, END), ["a"] * 3)
    assert earlier <= trajectory.began_s <= time.time()
    over = 0.0
    for turn in trajectory.turns:
        assert turn.began_s >= over
        over = turn.began_s + turn.generate_s + turn.step_s


async def test_a_step_changes_the_sampling_of_later_turns_only():
    steps = GO_ON, replace(GO_ON, sampling=SamplingParams(temperature=0.5)), GO_ON, END
    _, engine = await play(Scripted(*steps))
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 1.0, 0.5, 0.5]


async def test_an_environment_that_writes_into_its_action_ids_does_not_change_the_next_prompt():
    def spoil(states):
        states["action_ids"].append(77)
        return GO_ON

    trajectory, engine = await play(Scripted(spoil, END))
    assert engine.requests[1].prompt == "Q: hello<|im_end|>more"
    assert engine.requests[1].prompt_token_ids == tuple(trajectory.token_ids[: trajectory.turns[1].start])


async def test_an_environment_that_writes_into_its_task_does_not_change_its_siblings():
    task = Task([{"role": "user", "content": "Q"}], label=["42"], metadata={"tags": ["a"]})

    def prompt(states):
        states["observation"].insert(0, {"role": "system", "content": "S"})
        states["label"].append("43")
        states["metadata"]["tags"].clear()
        return states

    await play(Scripted(END, prompt=prompt), task=task)
    assert task == Task([{"role": "user", "content": "Q"}], label=["42"], metadata={"tags": ["a"]})


async def test_facts_about_the_label_from_reset_are_available_in_step():
    agent = Scripted(END)
    await play(agent, task=Task("Q", label={"answer": 1}))
    assert agent.seen[0]["label"] is agent.reset_states["label"]


# --- plain and async environments, and their constructors ---------------------------------------------------------


class Plain(AgentInstance):
    """Everything plain: each call reports the thread it ran in."""

    def __init__(self, wait_s=0.0):
        self.wait_s, self.threads = wait_s, {}

    def reset(self, states):
        self.threads["reset"] = threading.current_thread()
        return states

    def step(self, states):
        self.threads["step"] = threading.current_thread()
        time.sleep(self.wait_s)
        return GO_ON

    def on_truncate(self, states):
        self.threads["on_truncate"] = threading.current_thread()

    def close(self):
        self.threads["close"] = threading.current_thread()


async def test_plain_methods_run_off_the_event_loop():
    agent = Plain()
    trajectory, _ = await play(agent, limits=Limits(max_turns=1))
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert sorted(agent.threads) == ["close", "on_truncate", "reset", "step"]
    assert threading.main_thread() not in agent.threads.values()


async def test_slow_plain_steps_of_many_episodes_run_side_by_side():
    meeting = threading.Barrier(40, timeout=60)  # which none would pass that waits for another's step

    class Meets(Plain):
        def step(self, states):
            meeting.wait()
            return GO_ON

    played = await asyncio.gather(*(play(Meets(), limits=Limits(max_turns=1)) for _ in range(40)))
    assert [trajectory.error for trajectory, _ in played] == [None] * 40


class QueueEra(Scripted):
    async def __init__(self, *, depth=1):
        await asyncio.sleep(0)
        super().__init__(END)
        self.depth = depth


class Ordinary(Scripted):
    def __init__(self, *, depth=1):
        super().__init__(END)
        self.depth = depth


@pytest.mark.parametrize("cls", [QueueEra, Ordinary])
async def test_constructors_get_their_arguments_and_are_awaited_where_they_are_async(cls):
    agents = []

    async def make():
        agents.append(await create(cls, {"depth": 3}))
        return agents[0]

    trajectory, _ = await play(make)
    assert (trajectory.stop_reason, agents[0].depth, agents[0].num_closed) == (StopReason.TERMINATED, 3, 1)


async def test_a_constructor_that_blocks_ends_by_the_limit_of_a_step_and_its_late_instance_is_closed():
    released, closed = threading.Event(), asyncio.Event()

    class Late(Scripted):
        def __init__(self):
            super().__init__(END)
            released.wait(60)

        async def close(self):
            closed.set()

    trajectory, _ = await play(partial(create, Late, {}), limits=Limits(step_timeout_s=0.05))
    assert (trajectory.error.where, trajectory.error.type) == ("create", "StepTimeout")
    assert trajectory.error.message.startswith("create: expected an answer within 0.05 s")
    assert not closed.is_set()
    released.set()
    await asyncio.wait_for(closed.wait(), 60)


@pytest.mark.parametrize("moment", ["while it is made", "when it was made", "when its call knows"])
async def test_an_instance_whose_creation_is_cancelled_is_closed_before_the_cancellation_ends(moment):
    entered, go, closed = threading.Event(), threading.Event(), []

    class Late(Scripted):
        def __init__(self):
            super().__init__(END)
            entered.set()
            go.wait(60)

        async def close(self):
            await asyncio.sleep(0.01)
            closed.append(self)

    creating = asyncio.create_task(create(Late, {}))
    assert await asyncio.to_thread(entered.wait, 60)
    if moment == "while it is made":
        creating.cancel()
        await asyncio.sleep(0)
        go.set()
    else:
        (thread,) = (one for one in threading.enumerate() if "Late" in one.name)
        go.set()
        thread.join(60)  # the loop stands still meanwhile
        if moment == "when it was made":
            creating.cancel()
        else:
            asyncio.get_running_loop().call_soon(creating.cancel)
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("body", "can_block"),
    [("self.turn = [0]", False), ("self.turn = list()", True), ("import json; self.turn = 0", True),
     ("while not self: pass\n self.turn = 0", True), ("self.set = 0", True), ("self.turn = self.set", True)],
)  # fmt: skip
async def test_a_plain_constructor_runs_on_the_loop_only_if_it_cannot_block(body, can_block, monkeypatch):
    space, threads, start = {}, [], threading.Thread.start
    exec(f"def __init__(self):\n {body}", space)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: [threads.append(thread), start(thread)])
    methods = {"__init__": space["__init__"], "set": property(fget=id, fset=lambda self, value: None)}
    await create(type("Env", (AgentInstance,), methods), {})
    assert len(threads) == can_block
    methods["__setattr__"] = lambda self, name, value: None
    await create(type("Env", (AgentInstance,), methods), {})
    assert len(threads) == can_block + 1


async def test_a_plain_constructor_that_asks_for_the_running_loop_runs_on_it():
    class Client(Scripted):
        def __init__(self):
            super().__init__(END)
            self.loop = asyncio.get_running_loop()

    agents = await asyncio.gather(*(create(Client, {}) for _ in range(3)))
    assert {agent.loop for agent in agents} == {asyncio.get_running_loop()}


@pytest.mark.parametrize("cls", [QueueEra, Ordinary])
async def test_a_constructor_that_fails_is_recorded(cls):
    trajectory, engine = await play(partial(create, cls, {"no_such": 1}))
    assert (trajectory.error.where, trajectory.error.type, trajectory.reward) == ("create", "TypeError", None)
    assert engine.requests == []


# --- how an episode ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "limits", "script", "expected"),
    [
        (END, {}, ["a"], StopReason.TERMINATED),
        (StepResult(truncated=True), {}, ["a"], StopReason.TRUNCATED_BY_ENV),
        (GO_ON, {"max_turns": 2}, ["a"], StopReason.MAX_TURNS),
        (StepResult("x" * 999), {}, ["a"], StopReason.MAX_LENGTH),
        (StepResult(""), {"max_length": 8}, ["a" * 99], StopReason.MAX_LENGTH),
        (forever, {"step_timeout_s": 0.05}, ["a"], StopReason.STEP_TIMEOUT),
        (forever, {"episode_timeout_s": 0.05}, ["a"], StopReason.EPISODE_TIMEOUT),
        (END, {"episode_timeout_s": 0.05}, forever, StopReason.EPISODE_TIMEOUT),
        (END, {}, [Completion((), "abort")], StopReason.ABORTED),
        (END, {}, [Completion((5,), "abort")], StopReason.ABORTED),
        (END, {}, [Completion((5,), "error")], StopReason.ERROR),
        (ValueError("no"), {}, ["a"], StopReason.ERROR),
    ],
)
async def test_every_end_has_its_stop_reason_and_only_a_spent_budget_a_last_word(
    virtual_clock, step, limits, script, expected
):
    agent = Scripted(step, word=StepResult())
    trajectory, _ = await play(agent, script, limits=replace(Limits(max_length=200, max_turns=3), **limits))
    assert (trajectory.stop_reason, agent.num_closed) == (expected, 1)
    assert len(agent.truncations) == (expected in (StopReason.MAX_TURNS, StopReason.MAX_LENGTH))


WORD = StepResult(reward=0.25, score=0.5, info={"left": 2.0})


async def slow_from_turn_1(request):
    await asyncio.sleep(3600 if request.turn_index else 0)
    return "hello"


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "script"),
    [({"max_turns": 1}, ["a"]), ({"max_length": 14}, ["a"]), ({"episode_timeout_s": 0.3}, slow_from_turn_1)],
)
async def test_the_environment_has_the_last_word_when_a_limit_ends_the_episode(virtual_clock, limits, script):
    first = StepResult("0123456789", reward=0.5, score=0.1, info={"seen": 1.0})
    agent = Scripted(first, word=WORD)
    trajectory, _ = await play(agent, script, limits=replace(Limits(max_length=100), **limits))
    assert trajectory.truncated
    assert agent.truncations == agent.seen[:1]
    assert (trajectory.reward, trajectory.score) == (0.75, 0.5)
    assert trajectory.turns[-1].result.info == {"seen": 1.0, "left": 2.0}
    assert trajectory.segments[0].rewards[trajectory.turns[0].end - 1] == 0.75


async def test_an_action_that_max_length_cuts_is_judged_as_cut_then_the_environment_has_the_last_word():
    agent = Scripted(StepResult("", reward=0.5), word=WORD)
    trajectory, engine = await play(agent, ["abcdef"], task=Task("Q: "), limits=Limits(max_length=6))
    assert engine.requests[0].sampling.max_tokens == 3
    (judged,) = agent.seen
    assert (judged["action_text"], judged["finish_reason"], judged["tokens_left"]) == ("abc", "length", 0)
    assert agent.truncations == agent.seen
    assert (trajectory.stop_reason, trajectory.reward, trajectory.num_tokens) == (StopReason.MAX_LENGTH, 0.75, 6)
    assert trajectory.segments[0].rewards[-1] == 0.75


@pytest.mark.parametrize(("word", "reward"), [(None, 0.5), (StepResult(reward=1.0), 1.5)])
async def test_a_last_word_of_none_leaves_the_last_result_as_it_is_and_one_without_a_score_the_score(word, reward):
    agent = Scripted(StepResult("", reward=0.5, score=0.1), word=word)
    trajectory, _ = await play(agent, limits=Limits(max_turns=1))
    assert (trajectory.reward, trajectory.score) == (reward, 0.1)


@pytest.mark.parametrize("word", [None, StepResult(reward=1.0)])
async def test_what_judges_cost_in_on_truncate_is_added_to_the_last_turns(word):
    def judged(result, cost):
        return lambda _: add_usage({"judge/cost": cost}) or result

    agent = Scripted(judged(StepResult(""), 1.0), word=judged(word, 2.0))
    trajectory, _ = await play(agent, limits=Limits(max_turns=1))
    assert trajectory.turns[-1].result.info == {"judge/cost": 3.0}


@pytest.mark.parametrize("score", [7.0, -0.5, 1.01])
async def test_a_score_outside_0_to_1_is_an_error_of_the_episode(score):
    for step in (
        StepResult(score=score, terminated=True),
        {"rewards": 0.0, "environment_feedback": "", "done": True, "scores": score},
    ):
        trajectory, _ = await play(Scripted(step))
        assert trajectory.error.kind == "contract"
        assert f"expected a score in [0, 1], got {score}" in trajectory.error.message
        assert "declare the scale in the class: score_range" in trajectory.error.message
    trajectory, _ = await play(Scripted(GO_ON, word=StepResult(score=score)), limits=Limits(max_turns=1))
    assert trajectory.error.message.startswith("Scripted.on_truncate: expected a score in [0, 1]")


@pytest.mark.parametrize(("score_range", "score"), [((0.0, 10.0), 7.0), ((-1.0, 1.0), -1.0), (None, -99.5)])
async def test_an_environment_declares_the_range_of_its_scores(score_range, score):
    class Declared(Scripted):
        pass

    Declared.score_range = score_range
    trajectory, _ = await play(Declared(StepResult(score=score, terminated=True)))
    assert trajectory.score == score


async def test_a_score_may_exceed_its_range_by_rounding():
    trajectory, _ = await play(Scripted(StepResult(score=0.1 + 0.7 + 0.2 + 1e-12, terminated=True)))
    assert trajectory.error is None


@pytest.mark.parametrize("word", [ValueError("no"), forever, {"rewards": math.nan}], ids=["raises", "hangs", "nan"])
async def test_an_episode_whose_last_word_fails_has_no_reward(virtual_clock, word):
    agent = Scripted(replace(GO_ON, reward=0.5), word=word)
    trajectory, _ = await play(agent, limits=Limits(max_turns=1, step_timeout_s=0.05))
    assert trajectory.error.where == "on_truncate"
    assert (trajectory.reward, trajectory.score, agent.num_closed) == (None, None, 1)


async def test_a_timed_out_step_leaves_its_turn_without_a_result(virtual_clock):
    steps = StepResult("", reward=1.0, score=1.0), forever
    trajectory, _ = await play(Scripted(*steps), limits=Limits(step_timeout_s=0.05))
    assert [turn.result is None for turn in trajectory.turns] == [False, True]
    assert (trajectory.reward, trajectory.score, trajectory.error.type) == (None, None, "StepTimeout")
    assert "expected an answer within 0.05 s" in trajectory.error.message


async def test_an_aborted_action_is_kept_without_a_result():
    trajectory, _ = await play(Scripted(END), [Completion((5, 6), "abort")])
    assert (trajectory.token_ids.tolist()[-2:], trajectory.turns[-1].result) == ([5, 6], None)
    assert (trajectory.reward, trajectory.truncated) == (None, True)
    assert (trajectory.error.kind, trajectory.error.type, trajectory.error.where) == ("infra", "Aborted", "generate")


# --- failures are data --------------------------------------------------------------------------------------------


class Hard(BaseException):
    """What a foreign library may raise that is no Exception (Rust's panics, for one)."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), "env"),
        (TimeoutError("the environment's own"), "env"),
        (asyncio.CancelledError("the environment's own"), "env"),
        (Hard("panic"), "env"),
        (RuntimeError(), "env"),
        (InfraError("the grader is down"), "infra"),
        (ContractError("wrong"), "contract"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_an_exception_of_an_environment_is_recorded_and_it_is_closed_once(where, error, kind):
    error.__traceback__ = None  # of the same object in another test
    agent = Scripted(error)
    if where == "reset":
        agent.reset = partial(answer, error)
    trajectory, _ = await play(agent)
    assert trajectory.stop_reason is StopReason.ERROR
    recorded = trajectory.error
    assert (recorded.kind, recorded.type, recorded.where) == (kind, type(error).__name__, where)
    assert recorded.message
    assert f'File "{__file__}", line {recorded.place.rpartition(":")[2]}, in answer' in recorded.traceback
    assert f"{PACKAGE}/" not in recorded.traceback
    assert (trajectory.reward, trajectory.score, agent.num_closed) == (None, None, 1)


async def test_the_message_of_a_missing_column_names_those_of_the_row():
    class Desk(AgentInstance):
        async def step(self, states):
            return StepResult(states["metadata"]["rows"])

    task = Task("Q: ", metadata={"row": 1, "id": "x"})
    trajectory = await run_episode(Desk, task, engine=ScriptedEngine(["41"], CharTokenizer()))
    assert trajectory.error.message == "'rows'. The row has no column 'rows'. Did you mean 'row'? It has id, row."


async def test_the_message_of_an_error_keeps_both_ends_of_a_long_text(caplog):
    text = f"begin {chr(0xD800) * 3_900} end"
    trajectory, _ = await play(Scripted(ValueError(text)))
    assert trajectory.error.message == text
    (told,) = (each.getMessage() for each in caplog.records if each.name == "agentenv.episode.failures")
    assert (len(told) < 5_000, told[-4:]) == (True, " end")


async def test_the_message_of_a_column_that_a_wide_row_lacks_is_bounded():
    class Desk(AgentInstance):
        async def step(self, states):
            return StepResult(states["metadata"]["rows"])

    task = Task("Q: ", metadata={f"column{n}": n for n in range(1_000)})
    trajectory = await run_episode(Desk, task, engine=ScriptedEngine(["41"], CharTokenizer()))
    message = trajectory.error.message
    assert (len(message) < 5_000, message[:6], message[-5:]) == (True, "'rows'", "n999.")


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), StopIteration(1), Hard("panic")], ids=lambda error: type(error).__name__
)
async def test_an_exception_of_a_plain_step_in_its_thread_is_recorded_at_once(error):
    class Raising(Scripted):
        def step(self, states):
            raise error

    agent = Raising()
    trajectory, _ = await play(agent)
    assert (trajectory.stop_reason, trajectory.error.where, agent.num_closed) == (StopReason.ERROR, "step", 1)
    assert type(error).__name__ in trajectory.error.type + trajectory.error.message


async def test_an_async_method_that_exits_ends_its_episode_and_not_the_program():
    agent = Scripted(SystemExit(3))
    recorded = (await play(agent))[0].error
    assert (recorded.kind, recorded.type, recorded.where) == ("contract", "ContractError", "step")
    assert "SystemExit(3)" in recorded.message
    assert agent.num_closed == 1


async def test_a_step_that_swallows_cancellation_does_not_delay_others(virtual_clock):
    class Stubborn(Plain):
        released = asyncio.Event()

        async def step(self, states):
            while not self.released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.released.wait()
            return END

    trajectory, _ = await play(Stubborn(), limits=Limits(step_timeout_s=0.1))
    assert (trajectory.stop_reason, trajectory.error.type) == (StopReason.STEP_TIMEOUT, "StepTimeout")
    Stubborn.released.set()
    await asyncio.sleep(0)


async def test_a_generation_beyond_its_deadline_is_the_engines_failure(virtual_clock):
    engine = ScriptedEngine(["word"], CharTokenizer(), latency_s=30.0)
    trajectory, _ = await play(Scripted(END), engine=engine, limits=Limits(generate_timeout_s=0.1))
    assert (trajectory.stop_reason, trajectory.error.kind, trajectory.reward) == (StopReason.ERROR, "infra", None)
    assert trajectory.error.message.startswith("generate: expected a completion within 0.1 s, got none.")
    assert engine.num_cancelled == 1


@pytest.mark.parametrize("kind", [ConfigError, MissingDependency])
async def test_an_engine_that_is_set_up_wrongly_ends_more_than_its_episode(kind):
    agent = Scripted(END)
    with pytest.raises(kind, match="no such model"):
        await play(agent, [kind("no such model")])
    assert agent.num_closed == 1


async def test_an_environment_that_knows_that_all_episodes_would_fail_ends_the_run():
    agent = Scripted(RunStopped("the reward model is not there"))
    with pytest.raises(RunStopped, match="not there"):
        await play(agent)
    assert agent.num_closed == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1.0", [1.0, 2.0], {}], ids=repr)
@pytest.mark.parametrize("form", ["dict", "StepResult"])
async def test_a_reward_that_is_not_a_finite_number_breaks_the_contract(form, value):
    if form == "dict":
        agent = Scripted({"rewards": value, "environment_feedback": "", "done": True})
    else:
        agent = Scripted(lambda _: StepResult(reward=value, terminated=True))
    trajectory, _ = await play(agent)
    assert (trajectory.stop_reason, trajectory.error.kind) == (StopReason.ERROR, "contract")
    assert (trajectory.reward, trajectory.score) == (None, None)
    assert not any(trajectory.segments[0].rewards)


@pytest.mark.parametrize("value", [None, "done", 1.0, (1.0, "", True), {"rewards": 1.0}], ids=repr)
async def test_a_step_that_returns_something_else_breaks_the_contract(value):
    trajectory, _ = await play(Scripted(lambda _: value))
    assert (trajectory.error.kind, trajectory.error.where) == ("contract", "step")
    assert "Scripted.step: expected" in trajectory.error.message


@pytest.mark.parametrize("value", ["text", None, [], {"obs": "x"}], ids=repr)
async def test_a_reset_that_returns_something_else_breaks_the_contract(value):
    agent = Scripted(END)
    agent.reset = partial(answer, value)
    trajectory, _ = await play(agent)
    assert (trajectory.error.kind, trajectory.error.where, agent.num_closed) == ("contract", "reset", 1)
    assert "expected a dict with the key 'observation'" in trajectory.error.message


@pytest.mark.parametrize("num", [9, 10, 500])
async def test_a_prompt_without_room_for_an_action_is_a_fault_of_the_data_and_one_token_is_room(num):
    agent = Scripted(END)
    trajectory, engine = await play(agent, task=Task("x" * num), limits=Limits(max_length=9))
    assert (trajectory.stop_reason, trajectory.error.kind) == (StopReason.ERROR, "data")
    assert f"fewer than max_length=9 tokens, got {num}" in trajectory.error.message
    assert "Raise --max_length (in Python: Limits.max_length)" in trajectory.error.message
    assert (trajectory.reward, agent.num_closed, engine.requests) == (None, 1, [])
    trajectory, _ = await play(Scripted(END), task=Task("x" * num), limits=Limits(max_length=num + 1))
    assert (trajectory.stop_reason, trajectory.num_tokens) == (StopReason.TERMINATED, num + 1)


async def test_an_empty_prompt_is_a_fault_of_the_data():
    trajectory, _ = await play(Scripted(END), task=Task(""))
    assert trajectory.error.kind == "data"


@pytest.mark.parametrize(
    "reply",
    [
        RuntimeError("CUDA error"),
        TimeoutError("the engine's own"),
        asyncio.CancelledError("the engine's own"),
        Completion(()),
        Completion((), "length"),
        Completion((5,), "error"),
        Completion((5, 6), logprobs=(-0.5,)),
        Completion((5, 6), logprobs=(-0.5, 0.5)),
        Completion((5, 6), logprobs=(-0.5, -math.inf)),
        Completion((5, 6), policy_versions=(1,)),
        Completion((5, 2**31)),
        Completion((5, -1)),
        Completion((5,), policy_version=2**31),
        Completion((5,), policy_versions=(2**31,)),
        Completion((5,) * 500),
        Completion((5,) * 21),
    ],
    ids=repr,
)
async def test_an_engine_that_fails_or_lies_is_infrastructure_and_returns_no_reward(reply):
    agent = Scripted(END)
    trajectory, _ = await play(agent, partial(answer, reply), sampling=SamplingParams(max_tokens=20))
    assert (trajectory.stop_reason, trajectory.error.kind) == (StopReason.ERROR, "infra")
    assert trajectory.error.where == "generate"
    assert (trajectory.reward, trajectory.score, agent.num_closed, agent.seen) == (None, None, 1, [])
    assert not any(trajectory.action_mask)


@pytest.mark.parametrize(
    "reply", [ZeroDivisionError("a bug"), Completion((5, "6")), Completion((5,), logprobs=(None,))], ids=repr
)
async def test_a_bug_of_an_engine_is_no_infrastructure_that_is_tried_again(reply):
    trajectory, _ = await play(Scripted(END), partial(answer, reply))
    assert (trajectory.error.kind, trajectory.error.where, trajectory.reward) == ("contract", "generate", None)
    if isinstance(reply, Exception):
        assert trajectory.error.place.startswith(__file__)
        assert "ZeroDivisionError: a bug" in trajectory.error.traceback


async def test_an_engine_that_crashes_on_a_later_turn_keeps_the_turns_before_and_no_reward():
    engine = ScriptedEngine(["hello"], CharTokenizer(), crash_at=1)
    trajectory, _ = await play(Scripted(replace(GO_ON, reward=1.0)), engine=engine)
    assert (trajectory.error.kind, trajectory.error.type, len(trajectory.turns)) == ("infra", "EngineError", 1)
    assert trajectory.reward is None


@pytest.mark.parametrize("on_close", [ValueError("no"), forever], ids=["fails", "hangs"])
async def test_a_close_that_fails_or_hangs_does_not_undo_the_episode(virtual_clock, on_close):
    agent = Scripted(END, on_close=on_close)
    trajectory, _ = await play(agent, limits=Limits(step_timeout_s=0.05))
    assert (trajectory.stop_reason, trajectory.reward, agent.num_closed) == (StopReason.TERMINATED, 1.0, 1)


class Blocked(Scripted):
    """Has a plain tool that blocks its thread until it is released."""

    def __init__(self):
        super().__init__(on_close=lambda _: self.events.append("closed"))
        self.events, self.entered, self.released = [], threading.Event(), threading.Event()

    async def step(self, states):
        return StepResult(await answer_calls(ParsedAction("", (ToolCall("tool", {}, "1", ""),)), [self.tool]))

    def tool(self):
        self.entered.set()
        self.released.wait(60)
        self.events.append("tool ended")


@pytest.mark.parametrize("releases", [False, True], ids=["waits", "is what ends it"])
async def test_close_waits_for_a_thread_of_a_plain_tool_unless_it_is_what_ends_it(monkeypatch, releases):
    monkeypatch.setattr("agentenv._util.calls._CANCEL_GRACE_S", 0.01)
    monkeypatch.setattr("agentenv.tools.calling._CANCEL_GRACE_S", 0.01)
    monkeypatch.setattr("agentenv._util.calls._THREADS_END_S", 0.01 if releases else 60.0)
    agent = Blocked()
    agent.on_close = (lambda _: agent.released.set()) if releases else agent.on_close
    playing = asyncio.create_task(play(agent, limits=Limits(max_turns=1, step_timeout_s=60)))
    assert await asyncio.to_thread(agent.entered.wait, 60)
    playing.cancel()
    if not releases:
        await asyncio.wait({playing}, timeout=0.2)
        assert (agent.events, playing.done()) == ([], False)
        agent.released.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until(lambda: "tool ended" in agent.events)
    assert (agent.events, agent.num_closed) == (["tool ended"] if releases else ["tool ended", "closed"], 1)


async def test_a_reset_that_hangs_is_given_up(virtual_clock):
    agent = Scripted(END)
    agent.reset = forever
    trajectory, engine = await play(agent, limits=Limits(step_timeout_s=0.05))
    assert (trajectory.stop_reason, trajectory.error.where, agent.num_closed) == (StopReason.STEP_TIMEOUT, "reset", 1)
    assert (trajectory.reward, engine.requests) == (None, [])


async def test_an_engine_that_never_answers_is_cancelled_by_the_episode_timeout(virtual_clock):
    engine = ScriptedEngine(["a"], CharTokenizer(), latency_s=3600)
    trajectory, _ = await play(Scripted(END), engine=engine, limits=Limits(episode_timeout_s=0.05))
    assert (trajectory.stop_reason, engine.num_cancelled) == (StopReason.EPISODE_TIMEOUT, 1)


# --- cancellation -------------------------------------------------------------------------------------------------


async def give_way(value):
    await asyncio.sleep(0)
    return value


class Watched(ScriptedEngine):
    in_flight = 0

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        self.in_flight += 1
        try:
            return await super().generate(prompt_token_ids, sampling, request_id=request_id)
        finally:
            self.in_flight -= 1


async def cancel_after(num_steps):
    """Start an episode, give the loop `num_steps` rounds, cancel; None when the episode was over before."""
    made, engine = [], Watched(["word"], CharTokenizer())

    async def make():
        await give_way(None)
        go_on, nothing = (lambda _: give_way(GO_ON)), (lambda _: give_way(None))
        made.append(Scripted(go_on, prompt=give_way, word=nothing, on_close=give_way))
        return made[-1]

    task = asyncio.create_task(play(make, engine=engine, limits=Limits(max_length=200, max_turns=3)))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    if task.done():
        return None
    was_in_flight = engine.in_flight
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [agent.num_closed for agent in made] == [1] * len(made)
    assert (engine.in_flight, engine.num_cancelled) == (0, was_in_flight)
    return was_in_flight


async def test_invariant_20_cancelling_at_any_await_leaves_nothing_behind():
    outcomes = []
    while (outcome := await cancel_after(len(outcomes))) is not None:
        outcomes.append(outcome)
    assert len(outcomes) > 10
    assert outcomes.count(1) >= 3, "some of them were in the middle of a generation"


STUCK = """
import asyncio, threading
from agentenv.core.agent import AgentInstance
from agentenv.core.tool_calls import ToolCall
from agentenv.core.types import Limits, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.testing.tokenizers import CharTokenizer

class Stuck(AgentInstance):
    def step(self, states):
        threading.Event().wait()

options = dict(engine=ScriptedEngine(["a"], CharTokenizer()), tokenizer=CharTokenizer())
trajectory = asyncio.run(run_episode(Stuck, Task("q"), limits=Limits(step_timeout_s=0.2), **options))
print(trajectory.stop_reason.name, trajectory.reward)
"""


@pytest.mark.long
def test_a_plain_step_that_blocks_for_ever_costs_its_episode_and_not_the_process():
    options = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 120}
    ran = subprocess.run([sys.executable, "-c", STUCK], check=False, **options)
    assert (ran.returncode, ran.stdout) == (0, "STEP_TIMEOUT None\n")
