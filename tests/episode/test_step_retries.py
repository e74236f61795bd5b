"""A step that asks for it is called again with the same states, everywhere that episodes run."""

import asyncio
import pickle
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from agentenv._util.calls import create
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.env_actors.host import Failure
from agentenv.episode.loop import Episode
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.episode.setup import EpisodeKey, EpisodeSetup, StepRetries
from agentenv.episode.source import EnvSource
from agentenv.errors import InfraError
from agentenv.interop.agent_files import load_agent_func
from agentenv.runs.display.conversation import episode_line
from agentenv.runs.display.report import final_table, result_rows
from agentenv.runs.metrics import Tally, aggregate, summarize
from agentenv.runs.records.index import make_row, summary_of
from agentenv.runs.records.lines import trajectory_from_dict, trajectory_to_dict
from agentenv.testing.tokenizers import CharTokenizer


class Service:
    """A service in whose list of calls every `one_in`-th fails."""

    def __init__(self, one_in=0):
        self.num_calls, self.one_in, self.seen = 0, one_in, []

    def call(self, states, **error):
        self.num_calls += 1
        self.seen.append({name: repr(value) for name, value in states.items()})
        states["label"] = states["action_ids"][:] = None, None  # a step may write into what it gets
        if self.one_in and self.num_calls % self.one_in == 0:
            raise InfraError("service: expected an answer, got none. Try again.", **error)


class Asks(AgentInstance):
    """Three turns, each of which asks the service."""

    def __init__(self, service, retry_step=True):
        self.service, self.error = service, {"retry_step": True} if retry_step else {}

    async def step(self, states):
        turn = states["turn_index"]
        self.service.call(states, **self.error)
        return StepResult("Go on.", reward=1.0, terminated=turn == 2)


def shown(metrics):
    console = Console(width=120)
    with console.capture() as out:
        console.print(final_table(result_rows(metrics)))
    return out.get()


QUICK = ErrorPolicy(retry_wait_s=0.0)


async def run(service, *, num_tasks=20, policy=QUICK, source=None, **kwargs):
    tokenizer, ended = CharTokenizer(), []
    setup = EpisodeSetup(ScriptedEngine(["hi"], tokenizer), Chat(tokenizer), SamplingParams(), Limits(max_length=400))
    source = source or EnvSource(Asks, {"service": service, **kwargs})
    runner = EpisodeRunner(source, setup, concurrency=1, policy=policy)
    await runner.run(plan([Task("Hello.", "x", task_id=f"t{n}") for n in range(num_tasks)], 1), ended.append)
    return runner, ended


class StatusError(Exception):
    """An HTTP client's error."""

    def __init__(self, status_code):
        self.status_code = status_code


class Looks(AgentInstance):
    """A service refuses what an action asks for."""

    def __init__(self, status):
        self.status = status

    async def step(self, states):
        raise InfraError("map: expected roads, got a refusal.") from StatusError(self.status)


@pytest.mark.parametrize(
    ("status", "may_be_the_action"), [(404, True), (422, True), (401, False), (429, False), (503, False)]
)
async def test_an_infra_error_of_a_refused_request_says_that_the_action_may_have_caused_it(status, may_be_the_action):
    _, (ended,) = await run(
        None, num_tasks=1, policy=ErrorPolicy(max_retries=0), source=EnvSource(Looks, {"status": status})
    )
    hint = f" If the action caused status {status}, raise no InfraError: tell the policy, in a tool with ToolError."
    assert ended.error.message == "map: expected roads, got a refusal." + hint * may_be_the_action


async def test_a_service_that_fails_one_call_in_five_costs_no_episode():
    service = Service(one_in=5)
    runner, ended = await run(service)
    assert [each.reward for each in ended] == [3.0] * 20
    assert (runner.num_retries, runner.num_failed, service.num_calls) == (0, 0, 74)
    assert sum(turn.num_retries for each in ended for turn in each.turns) == 14
    tally = Tally(1)
    for each in ended:
        tally.add(summarize(each))
    metrics = tally.metrics(num_tasks=20, num_samples=1, wall_s=1.0)
    assert metrics.to_dict()["num_step_retries"] == 14
    assert "14 calls of `step` failed" in shown(metrics)
    assert metrics.retried_errors == {"InfraError": 14}
    assert "step retries" not in shown(replace(metrics, num_step_retries=0))
    without, failed = await run(Service(one_in=5), retry_step=False)
    assert without.num_retries > 5
    assert {turn.num_retries for each in failed for turn in each.turns} == {0}


async def test_the_second_call_sees_the_states_of_the_first():
    service = Service(one_in=3)
    _, (ended,) = await run(service, num_tasks=1)
    first, _, again, _ = service.seen
    assert ended.reward == 3.0
    assert [turn.num_retries for turn in ended.turns] == [0, 0, 1]
    assert first["label"] == again["label"] == "'x'"
    service = Service(one_in=2)
    await run(service, num_tasks=1)
    assert service.seen[1] == service.seen[2]


@pytest.mark.parametrize(("max_retries", "calls"), [(0, 1), (1, 4), (2, 9)])
async def test_retries_of_a_step_and_of_its_episode_are_bounded_by_max_retries(max_retries, calls):
    service = Service(one_in=1)
    policy = ErrorPolicy(max_retries=max_retries, retry_wait_s=0.0, max_error_share=1.0)
    _, (ended,) = await run(service, num_tasks=1, policy=policy)
    assert (service.num_calls, ended.attempt, ended.reward) == (calls, max_retries, None)
    assert ended.error.kind == "infra"
    assert ended.turns[0].num_retries == max_retries
    assert trajectory_from_dict(trajectory_to_dict(ended)).turns[0].num_retries == max_retries


class Hangs(AgentInstance):
    """A service that refuses the first step, and hangs from the second call on."""

    num_calls = 0

    async def step(self, states):
        self.num_calls += 1
        if self.num_calls > 1:
            await asyncio.Event().wait()
        raise InfraError("service: expected an answer, got none.", retry_step=True)

    async def on_truncate(self, states):
        raise AssertionError("the episode is not truncated")


@pytest.mark.parametrize("wait_s", [0.0, 1e9])
async def test_an_outage_that_meets_the_time_limit_of_the_episode_is_an_infrastructure_error(virtual_clock, wait_s):
    engine, limits = ScriptedEngine(["hi"], CharTokenizer()), Limits(episode_timeout_s=50.0)
    setup = EpisodeSetup(engine, Chat(engine.tokenizer), limits=limits, step_retries=StepRetries(2, wait_s))
    ended = await Episode(Task("Hello.", "x"), setup, EpisodeKey()).run(partial(create, Hangs, {}))
    assert (ended.stop_reason, ended.error.kind, ended.error.where) == (StopReason.ERROR, "infra", "step")
    assert (ended.error.message, ended.reward) == ("service: expected an answer, got none.", None)


class Refused(AgentInstance):
    """A service that refuses connections: two calls of the first step, and then the first attempt."""

    num_calls = 0

    async def step(self, states):
        Refused.num_calls += 1
        if Refused.num_calls <= 3:
            try:
                raise ConnectionRefusedError
            except ConnectionRefusedError as error:
                raise InfraError("service: expected an answer, got none.", retry_step=True) from error
        return StepResult(reward=1.0, terminated=True)


async def test_the_errors_of_retries_are_named_in_record_metrics_and_conversation():
    _, (ended,) = await run(None, num_tasks=1, source=EnvSource(Refused))
    assert (ended.reward, ended.attempt, ended.error) == (1.0, 1, None)
    assert ended.retried == ["InfraError (ConnectionRefusedError)"] * 3
    assert trajectory_from_dict(trajectory_to_dict(ended)).retried == ended.retried
    summary = summarize(ended)
    assert summary_of(make_row(ended, summary, 0, 1, "0")) == summary
    metrics = aggregate([summary], num_samples=1)
    assert metrics.to_dict()["retried_errors"] == {"InfraError (ConnectionRefusedError)": 3}
    assert (metrics.num_retries, metrics.num_step_retries) == (1, 2)
    assert "InfraError (ConnectionRefusedError) 3" in shown(metrics)
    assert " · 1 earlier attempt · retried after InfraError (ConnectionRefusedError) 3" in episode_line(ended)


async def test_an_agent_func_file_retries_as_often_as_the_run_says(tmp_path):
    (tmp_path / "agent_func.py").write_text(
        "from agentenv import AgentExecutor\n"
        f"from {__name__} import Asks\n\n\n"
        "class AgentExecutor(AgentExecutor):\n    agent_cls = Asks\n"
    )
    func, service = load_agent_func(tmp_path / "agent_func.py"), Service(one_in=1)
    func.executor_cls.agent_kwargs = {"service": service}
    await run(service, num_tasks=1, policy=ErrorPolicy(1, retry_wait_s=0.0, max_error_share=1.0), source=func)
    assert service.num_calls == 4


@pytest.mark.parametrize("retry_step", [False, True])
def test_the_wish_for_a_retry_crosses_processes(retry_step):
    error = InfraError("service: gone", retry_step=retry_step)
    assert pickle.loads(pickle.dumps(error)).retry_step is retry_step
    there = pickle.loads(pickle.dumps(Failure.of(error))).error()
    assert isinstance(there, InfraError)
    assert there.retry_step is retry_step
