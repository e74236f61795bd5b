"""An audit ends in time: it leaves out episodes, says so, and names the calls that take long."""

import asyncio
import math
import time
from dataclasses import replace
from functools import partial

import pytest

from agentenv._util.calls import create
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.types import Limits, SamplingParams, StepResult
from agentenv.episode.source import EnvSource
from agentenv.errors import InfraError
from agentenv.testing.audit import episodes
from agentenv.testing.audit.auditing import AuditOptions, audit_env
from agentenv.testing.audit.episodes import PolicyRunner, replay_all
from agentenv.testing.audit.policies import AuditPolicy
from agentenv.testing.audit.report import verdict
from agentenv.testing.chats import stand_in
from tests.testing.planted.faults import Desk

LIMITS = Limits(max_length=200_000, max_turns=8, step_timeout_s=3600.0)  # only the time of the audit ends a call


class WaitsInReset(Desk):
    """A client of a service that never answers."""

    async def reset(self, states):
        await asyncio.Event().wait()


class WaitsAgain(Desk):
    """A client of a service that never answers, which asks for a further attempt at once."""

    async def step(self, states):
        await asyncio.sleep(0.05)
        raise InfraError("desk: expected an answer, got none.", retry_step=True)


async def audited(cls, **options):
    tasks = [in_messages(task) for path in cls.datasets.values() for task in read_tasks(str(path))]
    return await audit_env(EnvSource(cls), tasks, options=AuditOptions(limits=LIMITS, max_tokens=2_000, **options))


async def test_an_audit_without_time_resets_nothing_ends_and_says_what_it_left_out(monkeypatch):
    resets = []
    monkeypatch.setattr(Desk, "reset", lambda self, states: resets.append(states))
    result = await audited(Desk, time_limit_s=math.ulp(0.0))
    assert (result.num_plays, resets) == (0, [])
    assert any(line.endswith("because time ran out (--time_limit_s)") for line in result.not_examined)
    assert any(line.startswith("policies that had no time on any task: ") for line in result.not_examined)
    assert not any("gold" in each.summary for each in result.findings)  # it may be known
    assert result.exit_code() == 4
    num = result.num_left_out
    assert num > 0
    assert verdict(result).startswith(f"too little could be judged: time ran out for {num} of {num} episodes. ")


@pytest.mark.parametrize(
    ("num_left_out", "not_played", "exit_code"), [(10, (), 0), (11, (), 4), (1, ("code",), 4), (0, (), 0)]
)
async def test_an_audit_passes_if_time_ran_out_for_a_tenth_of_the_episodes_at_most_and_for_no_policy(
    num_left_out, not_played, exit_code
):
    result = await audited(Desk, policies=("null",), num_tasks=1, repeat=False)
    result = replace(result, num_plays=90, findings=(), num_left_out=num_left_out, not_played=not_played)
    assert result.exit_code() == exit_code
    assert verdict(result).split(":")[0] == ("too little could be judged" if exit_code else "passed")


@pytest.mark.parametrize("cls", [WaitsInReset, WaitsAgain])
async def test_an_audit_ends_in_time_whatever_waits(cls):
    result = await audited(cls, time_limit_s=0.3)
    assert result.num_plays == 0
    assert result.exit_code() == 4


async def test_the_baselines_are_the_first_that_have_time():
    actions = []

    class Listens(Desk):
        async def step(self, states):
            actions.append(states["action_text"])
            await asyncio.Event().wait()

    audit = asyncio.ensure_future(audited(Listens, concurrency=1, num_tasks=1))
    while not actions:
        await asyncio.sleep(0.001)
    audit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await audit
    assert actions == [""]


async def test_a_repetition_ends_when_the_time_is_over():
    class WaitsTheSecondTime(Desk):
        times = 0

        async def step(self, states):
            WaitsTheSecondTime.times += 1
            if WaitsTheSecondTime.times > 1:
                await asyncio.Event().wait()
            return StepResult(terminated=True)

    task = next(in_messages(task) for path in Desk.datasets.values() for task in read_tasks(str(path)))
    used = episodes.Budget()
    runner = PolicyRunner(
        partial(create, WaitsTheSecondTime, {}), [task], stand_in(), LIMITS, SamplingParams(max_tokens=100), budget=used
    )
    play = await runner.play(AuditPolicy("constant", "0", "null", lambda view: "0"), task)
    used.limit_s = time.perf_counter() - used.started_s + 0.1
    pairs = await replay_all(runner, [play, play], {task.task_id: task}, notify=lambda done: None)
    assert pairs == []
    assert used.num_not_repeated == 2


async def test_calls_that_take_long_are_named_and_others_come_first(monkeypatch):
    add = episodes.Budget.add

    def add_as_on_an_idle_machine(self, policy, task_id, action, step_s):
        add(self, policy, task_id, action, episodes.SLOW_S if '"lookup"' in action else 0.0)

    monkeypatch.setattr(episodes.Budget, "add", add_as_on_an_idle_machine)
    monkeypatch.setattr(episodes, "_OF_ONE_POLICY", 0.0)
    result = await audited(Desk, policies=("calls", "giving_up"), repeat=False)
    found = {each.id: each for each in result.findings}
    assert found["slow-call"].severity == "note"
    assert "calls of lookup" in found["slow-call"].summary
    assert '"lookup"' in found["slow-call"].evidence[0].action
    assert not any("because time ran out" in line for line in result.not_examined)
    assert {play.policy for play in result.plays} >= {"calls", "giving_up", "gold", "null"}
