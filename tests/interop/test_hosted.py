"""What adapters share: failed episodes in each host's idiom, a host's episodes, and a host that samples in batches."""

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.runner import PlannedEpisode
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, EngineError, InfraError
from agentenv.interop.hosted import FailureCount, GatheringEngine, limits_of, problem_of, run_planned
from agentenv.testing.tokenizers import CharTokenizer


def failed():
    trajectory = Trajectory(Task("q"), 32, prompt="q", episode_id="q/1")
    trajectory.append_observation([1, 2])
    trajectory.append_turn(Completion((3,), logprobs=(-1.0,)), "3")
    trajectory.finish(StopReason.ERROR, EpisodeError("env", "ValueError", "it broke", "step", "env.py:7"))
    return trajectory


@pytest.mark.parametrize("given", [{"max_turn": 2}, {"max_turns": 0}, 3])
def test_limits_that_are_none_are_refused_by_their_place(given):
    with pytest.raises(ConfigError, match=r"^Host\.limits: expected .*(max_turn|3)"):
        limits_of(given, None, "Host.limits")


def test_a_problem_is_told_for_episodes_without_a_reward_only():
    assert problem_of(failed()) == "step at env.py:7: ValueError: it broke"
    fine = Trajectory(Task("q"), 32)
    fine.append_observation([1])
    fine.append_turn(Completion((3,)), "3")
    fine.set_result(StepResult(reward=0.0))
    fine.finish(StopReason.TERMINATED)
    assert problem_of(fine) is None
    aborted = Trajectory(Task("q"), 32)
    aborted.finish(StopReason.ABORTED)
    assert problem_of(aborted) == "it ended as aborted."


def test_failures_in_a_row_end_the_job_and_others_warn(caplog):
    count = FailureCount("Host.run")
    for problem in ("a", "b", None, "c"):
        count.add(replace(failed(), retried=["InfraError"]), problem, max_in_a_row=3, result="It is left out.")
    assert (count.num_episodes, count.num_failed, count.in_a_row) == (4, 3, 1)
    assert repr(count) == "Host.run: 3 of 4 episodes failed, steps called again: 4"
    count.add(failed(), "d", max_in_a_row=3)
    with pytest.raises(InfraError, match=r"failed: e\. Failures in a row: 3\."):
        count.add(failed(), "e", max_in_a_row=3)


def test_what_a_host_gets_is_told_once_and_a_failure_again_only_if_the_log_lacks_it(caplog):
    count, aborted = FailureCount("Host.run"), replace(failed(), error=None, episode_id="q/2")
    for each in (failed(), failed(), aborted):
        count.add(each, "a", max_in_a_row=9, result="It is left out.")
    assert [record.getMessage() for record in caplog.records] == [
        f"Host.run: expected an episode to train on, got {name!r}, which failed: a. It is left out."
        for name in ("q/1", "q/2")
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "is_shown"), [("", True), ("from agentenv.cli.main import main; main(['-h']); ", False)]
)
def test_warnings_reach_stderr_in_a_process_without_logging_and_not_in_a_command(before, is_shown):
    code = (
        f"{before}from agentenv.interop.hosted import FailureCount; from agentenv import Task, Trajectory; "
        "FailureCount('Host.run').add(Trajectory(Task('q'), 9), 'a', max_in_a_row=2)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("Host.run: expected an episode to train on, got" in ended.stderr) is is_shown


def test_a_host_that_wants_an_exception_gets_it_at_the_first_failure():
    with pytest.raises(InfraError, match=r"failed: a\. Fix the cause\.$"):
        FailureCount("Host.run").add(failed(), "a")


class Echo(AgentInstance):
    """Ends at once; fails for the task "bad"."""

    async def reset(self, states):
        self.is_bad = states["label"] == "bad"
        return states

    async def step(self, states):
        if self.is_bad:
            raise ValueError("bad")
        return StepResult(reward=float(len(states["action_text"])), terminated=True)


async def test_a_hosts_episodes_come_back_in_its_order_and_failed_ones_stay_in_place():
    tokenizer = CharTokenizer()
    engine = ScriptedEngine(lambda request: "x" * (1 + int(request.episode_id[-1])), tokenizer)
    setup = EpisodeSetup(engine, Chat(tokenizer), SamplingParams(seed=3))
    tasks = [Task("q", label=label, task_id=label) for label in ("a", "bad", "b")]
    planned = [PlannedEpisode(task, i) for i, task in enumerate(tasks)]
    made = await run_planned(EnvSource(Echo), setup, planned)
    assert [trajectory.reward for trajectory in made] == [1.0, None, 3.0]
    again = await run_planned(EnvSource(Echo), setup, planned)
    assert [trajectory.seed for trajectory in again] == [trajectory.seed for trajectory in made]


# --- a host that samples one batch at a time --------------------------------------------------------------------------


def ask(engine, *prompts):
    return asyncio.gather(*(engine.generate(prompt, SamplingParams(), request_id="e/0") for prompt in prompts))


async def test_what_is_asked_together_is_one_batch_and_each_gets_its_own_answer():
    batches = []

    def ask_all(requests):
        batches.append([request.prompt_ids for request in requests])
        return [Completion((request.prompt_ids[0] + 1,)) for request in requests]

    engine = GatheringEngine(ask_all)
    assert [each.token_ids for each in await ask(engine, [1], [5], [7])] == [(2,), (6,), (8,)]
    assert [each.token_ids for each in await ask(engine, [3])] == [(4,)]
    assert batches == [[[1], [5], [7]], [[3]]]


async def test_what_is_asked_while_a_batch_runs_is_the_next_batch_and_the_loop_stays_free():
    batches, started, released = [], threading.Event(), threading.Event()

    def ask_all(requests):
        batches.append(len(requests))
        started.set()
        released.wait(60)
        return [Completion((9,)) for _ in requests]

    engine = GatheringEngine(ask_all, wait_s=0.0)
    first = asyncio.ensure_future(ask(engine, [1]))
    assert await asyncio.to_thread(started.wait, 60)
    second = asyncio.ensure_future(ask(engine, [2], [3]))
    await asyncio.sleep(0)
    released.set()
    await asyncio.gather(first, second)
    assert batches == [1, 2]


async def test_a_host_that_raises_or_answers_too_few_is_an_engine_error_of_every_request():
    def broken(requests):
        raise RuntimeError("out of memory")

    answers = await asyncio.gather(
        *(GatheringEngine(broken).generate([1], SamplingParams(), request_id="e/0") for _ in range(2)),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [EngineError] * 2
    assert "RuntimeError: out of memory" in str(answers[0])
    with pytest.raises(EngineError, match="expected 2 completions, got 1"):
        await ask(GatheringEngine(lambda requests: [Completion((1,))]), [1], [2])
