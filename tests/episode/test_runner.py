"""The runner: how many episodes run at once, which are tried again with which seeds, and what ends a run."""

import asyncio
from dataclasses import replace

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, PlannedEpisode, derive_seed, plan
from agentenv.episode.setup import EpisodeSetup, Stage
from agentenv.episode.source import EnvSource
from agentenv.errors import DataError, InfraError, RunStopped
from agentenv.runs.records.directory import Outbox, RunWriter, read_trajectories
from agentenv.testing.tokenizers import CharTokenizer

QUICK = ErrorPolicy(retry_wait_s=0.0)
END = StepResult(reward=1.0, score=1.0, terminated=True)


class Watched(AgentInstance):
    """Ends at once, or does what `behave(states)` does; counts who is open and keeps what it was given."""

    def __init__(self, log=None, behave=None):
        self.log, self.behave = log if log is not None else Log(), behave
        self.log.open += 1
        self.log.most_open = max(self.log.most_open, self.log.open)

    async def reset(self, states):
        self.log.env_seeds.append(states["seed"])
        return states

    async def step(self, states):
        self.log.sampling_seeds.append(states["sampling_params"].seed)
        result = END if self.behave is None else self.behave(states)
        if asyncio.iscoroutine(result):
            result = await result
        return result

    async def close(self):
        self.log.open -= 1


class Log:
    def __init__(self):
        self.open = self.most_open = 0
        self.env_seeds, self.sampling_seeds = [], []


def make_tasks(num):
    return [Task(f"question {i}", label=str(i), task_id=f"t{i}") for i in range(num)]


def make_runner(behave=None, *, log=None, script=("hi",), seed=0, latency_s=0.0, **options):
    tokenizer = CharTokenizer()
    options = {"policy": QUICK, "concurrency": 8} | options
    return EpisodeRunner(
        EnvSource(Watched, {"log": log if log is not None else Log(), "behave": behave}),
        EpisodeSetup(
            engine=options.pop("engine", None) or ScriptedEngine(script, tokenizer, latency_s=latency_s),
            chat=Chat(tokenizer),
            sampling=SamplingParams(seed=seed),
            limits=Limits(max_length=200, max_turns=3),
        ),
        **options,
    )


async def run_all(runner, planned):
    ended = []
    await runner.run(planned, ended.append)
    return ended


def raises(error):
    def behave(_):
        raise error

    return behave


# --- planning -----------------------------------------------------------------------------------------------------


def test_a_plan_has_every_sample_of_every_task_in_the_order_of_the_data():
    ids = [planned.episode_id for planned in plan(make_tasks(2), 3)]
    assert ids == ["t0/0", "t0/1", "t0/2", "t1/0", "t1/1", "t1/2"]


def test_a_plan_leaves_out_what_is_finished_and_counts_attempts_on():
    planned = list(plan(make_tasks(2), 2, finished={"t0/1"}, attempts={"t1/0": (1, ("E",))}))
    known = [(p.episode_id, p.first_attempt, p.retried) for p in planned]
    assert known == [("t0/0", 0, ()), ("t1/0", 1, ("E",)), ("t1/1", 0, ())]


# --- concurrency --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3, 7])
async def test_never_more_episodes_than_the_concurrency_and_as_many_where_there_is_work(concurrency):
    log = Log()
    runner = make_runner(log=log, latency_s=0.005, concurrency=concurrency)
    ended = await run_all(runner, plan(make_tasks(20), 1))
    assert len(ended) == 20
    assert log.most_open == concurrency
    assert (log.open, runner.num_running, runner.in_flight) == (0, 0, {})


async def test_an_episode_is_in_flight_until_its_record_has_been_taken():
    seen = []

    async def on_end(trajectory):
        await asyncio.sleep(0)
        seen.append((trajectory.episode_id in runner.in_flight, runner.num_running, runner.num_done))

    runner = make_runner(concurrency=1)
    await runner.run(plan(make_tasks(2), 1), on_end)
    assert seen == [(True, 0, 1), (True, 0, 2)]
    assert runner.in_flight == {}


async def test_a_plan_is_pulled_only_as_far_as_episodes_can_start_and_cancelling_the_run_ends_them_all():
    pulled = 0

    def endless():
        nonlocal pulled
        for task in make_tasks(1_000):
            pulled += 1
            yield PlannedEpisode(task, 0)

    log = Log()
    runner = make_runner(log=log, latency_s=60.0, concurrency=4)
    running = asyncio.ensure_future(runner.run(endless(), lambda _: None))
    while len(runner.setup.engine.requests) < 4:
        await asyncio.sleep(0)
    assert pulled == 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (runner.setup.engine.num_cancelled, log.open) == (4, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- retries ------------------------------------------------------------------------------------------------------


async def test_an_infrastructure_error_is_tried_again_with_other_tokens_in_the_same_environment(caplog):
    log = Log()
    runner = make_runner(raises(InfraError("down")), log=log, policy=replace(QUICK, max_error_share=1.0))
    (ended,) = await run_all(runner, plan(make_tasks(1), 1))
    assert (ended.error.kind, ended.attempt, ended.reward) == ("infra", 2, None)
    assert len(set(log.sampling_seeds)) == 3
    assert len(log.env_seeds) == 3
    assert len(set(log.env_seeds)) == 1
    assert (runner.num_retries, runner.num_done, runner.num_failed) == (2, 1, 1)
    told = [record.getMessage() for record in caplog.records if "run again" in record.getMessage()]
    assert told == [f"episode t0/0 is run again, as attempt {attempt} of 3." for attempt in (2, 3)]


@pytest.mark.parametrize("error", [ValueError("bug"), TypeError("bug"), OSError("bug")])
async def test_an_error_of_the_environment_is_not_tried_again(error):
    log = Log()
    runner = make_runner(raises(error), log=log, policy=replace(QUICK, max_error_share=1.0))
    (ended,) = await run_all(runner, plan(make_tasks(1), 1))
    assert (ended.error.kind, ended.attempt, len(log.env_seeds)) == ("env", 0, 1)


async def test_the_wait_before_a_retry_doubles(virtual_clock):
    times = []

    def behave(_):
        times.append(virtual_clock.elapsed_s)
        raise InfraError("down")

    policy = ErrorPolicy(max_retries=2, retry_wait_s=0.1, max_error_share=1.0)
    await run_all(make_runner(behave, policy=policy), plan(make_tasks(1), 1))
    assert times == pytest.approx([0.0, 0.1, 0.3])


async def test_attempts_of_a_resumed_episode_count_on_with_new_seeds():
    first, second = Log(), Log()
    policy = ErrorPolicy(max_retries=1, retry_wait_s=0.0, max_error_share=1.0)
    (failed,) = await run_all(make_runner(raises(InfraError("down")), log=first, policy=policy), plan(make_tasks(1), 1))
    (ended,) = await run_all(
        make_runner(raises(InfraError("down")), log=second, policy=policy),
        plan(make_tasks(1), 1, attempts={"t0/0": (failed.attempt + 1, (*failed.retried, "OSError"))}),
    )
    assert (failed.attempt, ended.attempt) == (1, 3)
    assert ended.retried == ["InfraError", "OSError", "InfraError"]
    assert len({*first.sampling_seeds, *second.sampling_seeds}) == 4
    assert set(first.env_seeds) == set(second.env_seeds)


# --- seeds --------------------------------------------------------------------------------------------------------


async def test_siblings_share_the_environments_seed_and_sample_with_their_own():
    ended = await run_all(make_runner(log=(log := Log())), plan(make_tasks(2), 4))
    seeds = {}
    for trajectory in ended:
        seeds.setdefault(trajectory.group_id, set()).add(trajectory.seed)
    assert [len(group) for group in seeds.values()] == [1, 1]
    assert len(set.union(*seeds.values())) == 2
    assert len(set(log.sampling_seeds)) == 8


async def test_a_tasks_own_seed_wins():
    task = Task("q", task_id="t", seed=99)
    (ended,) = await run_all(make_runner(), plan([task], 1))
    assert ended.seed == 99


async def seeds_of(runner, planned):
    """Environment's and sampling seed by episode; samples of an engine know their episode."""
    ended = await run_all(runner, planned)
    sampled = {request.episode_id: request.sampling.seed for request in runner.setup.engine.requests}
    return {t.episode_id: (t.seed, sampled[t.episode_id]) for t in ended}, [t.episode_id for t in ended]


async def test_seeds_depend_on_the_runs_seed_and_the_episode_but_not_on_the_order_of_completion():
    async def reverse(states):
        await asyncio.sleep(0.01 * (6 - int(states["label"])))
        return END

    forward, order = await seeds_of(make_runner(concurrency=1), plan(make_tasks(6), 2))
    backward, other_order = await seeds_of(make_runner(reverse, concurrency=12), plan(make_tasks(6), 2))
    assert order != other_order
    assert forward == backward
    other_run, _ = await seeds_of(make_runner(seed=1), plan(make_tasks(6), 2))
    assert all(forward[key][0] != other_run[key][0] and forward[key][1] != other_run[key][1] for key in forward)


async def test_without_a_run_seed_sampling_is_unseeded_and_the_environment_still_repeatable():
    seeds, _ = await seeds_of(make_runner(seed=None), plan(make_tasks(2), 1))
    again, _ = await seeds_of(make_runner(seed=None), plan(make_tasks(2), 1))
    assert [sampling for _, sampling in seeds.values()] == [None, None]
    assert seeds == again


def test_derived_seeds_are_the_same_on_every_machine_and_distinguish_their_parts():
    assert derive_seed(0, "000000/0", 0) == 552896582
    many = {derive_seed(run, f"t/{i}", attempt) for run in range(10) for i in range(100) for attempt in range(3)}
    assert len(many) == 3_000
    assert all(0 <= seed < 2**31 for seed in many)


# --- the fuse -----------------------------------------------------------------------------------------------------


async def test_too_many_failures_stop_the_run_with_the_first_three_messages_and_close_what_is_in_flight():
    log = Log()

    async def behave(states):
        number = int(states["label"])
        if number >= 10:
            await asyncio.sleep(3600)
        raise ValueError(f"bug {'aabcdddddd'[number]} of answer-{number}f9 after {number}.5 s")

    policy = ErrorPolicy(min_episodes=10, max_error_share=0.5)
    runner = make_runner(behave, log=log, policy=policy, concurrency=14)
    ended = []
    with pytest.raises(RunStopped) as stopped:
        await runner.run(plan(make_tasks(500), 1), ended.append)
    message = str(stopped.value)
    assert "at most 50%" in message
    assert "10 of 10" in message
    for said in ("bug a of answer-0f9 after 0.5 s (2 times)", "bug b of answer-2f9 after 2.5 s (1 time)", "bug c of"):
        assert message.count(f"ValueError: {said}") == 1
    assert message.count("ValueError: bug") == 3
    assert len(ended) == 10
    assert (log.open, runner.num_running) == (0, 0)
    assert len(runner.setup.engine.requests) < 30


async def test_failures_up_to_the_share_do_not_stop_the_run():
    def behave(states):
        return END if int(states["label"]) % 5 < 4 else raises(ValueError("bug"))(states)

    runner = make_runner(behave, policy=ErrorPolicy(min_episodes=10, max_error_share=0.25))
    assert len(await run_all(runner, plan(make_tasks(100), 1))) == 100
    assert runner.num_failed == 20
    runner.check_error_share()


@pytest.mark.parametrize(("error", "of_service"), [(ValueError("bug"), False), (ConnectionError("refused"), True)])
async def test_a_run_smaller_than_the_fuse_is_judged_at_its_end_with_advice_if_a_service_may_have_failed(
    error, of_service
):
    runner = make_runner(raises(error), policy=ErrorPolicy(min_episodes=20))
    assert len(await run_all(runner, plan(make_tasks(3), 1))) == 3
    with pytest.raises(RunStopped, match="3 of 3") as stopped:
        runner.check_error_share()
    assert ("raise agentenv.errors.InfraError from it" in str(stopped.value)) == of_service


@pytest.mark.parametrize(("also", "is_outage"), [([], True), (["bug"], False)])
async def test_a_run_that_an_outage_alone_stops_names_it_and_says_that_it_may_be_over(also, is_outage):
    def behave(states):
        if states["label"] in also:
            raise ValueError("bug")
        raise InfraError("prices: expected a price, got none.") from ConnectionRefusedError()

    runner = make_runner(behave, policy=ErrorPolicy(max_retries=0, max_error_share=1.0))
    tasks = [*make_tasks(3), *(Task("question", label=label, task_id=label) for label in also)]
    await run_all(runner, plan(tasks, 1))
    runner.policy = ErrorPolicy()
    with pytest.raises(RunStopped) as stopped:
        runner.check_error_share()
    advice = "A service failed: InfraError (ConnectionRefusedError) 3 times. If it works again, --resume, or raise "
    assert (advice in str(stopped.value)) == is_outage
    assert ("Fix the environment or the engine and --resume" in str(stopped.value)) != is_outage


OUTAGE, BUG = InfraError("prices: expected a price, got none."), ValueError("bug")


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("before", "now"), [(OUTAGE, BUG), (BUG, OUTAGE), (OUTAGE, OUTAGE)])
async def test_whether_a_service_failed_is_said_of_the_episodes_that_are_judged(before, now, window):
    def behave(states):
        raise now if int(states["label"]) >= 4 else before

    policy = ErrorPolicy(max_retries=0, min_episodes=99, window=window)
    runner = make_runner(behave, concurrency=1, policy=policy)
    await run_all(runner, plan(make_tasks(4), 1))
    if window is None:  # as between two evaluations
        runner.num_done = 0
        runner.errors.clear()
    await run_all(runner, plan(make_tasks(8)[4:], 1))
    with pytest.raises(RunStopped, match="4 of ") as stopped:
        runner.check_error_share()
    assert ("A service failed: InfraError 4 times." in str(stopped.value)) == (now is OUTAGE)


async def test_an_outage_in_an_episode_that_no_record_can_hold_is_counted_as_the_error_of_the_record():
    def on_end(trajectory):
        if trajectory.error.kind == "infra":
            raise DataError("info: expected plain numbers, got a list.")

    runner = make_runner(raises(OUTAGE), policy=ErrorPolicy(max_retries=0))
    await runner.run(plan(make_tasks(3), 1), on_end)
    with pytest.raises(RunStopped, match=r"3 of 3.*DataError.* Fix the environment or the engine") as stopped:
        runner.check_error_share()
    assert "InfraError" not in str(stopped.value)


def failing(numbers):
    def behave(states):
        return raises(ValueError(f"bug {states['label']}"))(states) if int(states["label"]) in numbers else END

    return behave


async def test_with_a_window_an_old_failure_is_forgotten():
    policy = ErrorPolicy(window=40, max_error_share=0.25)
    early = failing(set(range(30, 40)))
    runner = make_runner(early, concurrency=1, policy=policy)
    assert len(await run_all(runner, plan(make_tasks(100), 1))) == 100
    runner.check_error_share()
    assert runner.num_failed == 10


async def test_with_a_window_what_was_before_the_counts_were_set_back_is_forgotten():
    runner = make_runner(failing(set(range(10))), concurrency=1, policy=ErrorPolicy(window=40, max_error_share=0.25))
    await run_all(runner, plan(make_tasks(15), 1))
    with pytest.raises(RunStopped, match="10 of the last 15"):
        runner.check_error_share()
    runner.num_done = 0
    runner.errors.clear()
    await run_all(runner, plan(make_tasks(30)[20:], 1))
    runner.check_error_share()


# --- ending early -------------------------------------------------------------------------------------------------


async def test_drain_lets_episodes_in_flight_end_and_starts_none(virtual_clock):
    runner = make_runner(latency_s=0.05, concurrency=3)
    ended = []
    running = asyncio.ensure_future(runner.run(plan(make_tasks(100), 1), ended.append))
    while runner.num_running < 3:
        await asyncio.sleep(0)
    runner.drain()
    await asyncio.wait_for(running, 60)
    assert len(ended) == 3
    assert all(t.error is None and t.stop_reason.terminated for t in ended)
    assert len(runner.setup.engine.requests) == 3


async def test_drain_ends_the_wait_for_a_retry_and_tries_no_more():
    log = Log()
    policy = ErrorPolicy(max_retries=5, retry_wait_s=60.0, max_error_share=1.0)
    runner = make_runner(raises(InfraError("down")), log=log, policy=policy)
    ended = []
    running = asyncio.ensure_future(runner.run(plan(make_tasks(1), 1), ended.append))
    while not log.env_seeds or any(progress.stage is not Stage.QUEUED for progress in runner.in_flight.values()):
        await asyncio.sleep(0.001)
    runner.drain()
    await asyncio.wait_for(running, 60)
    assert [(t.error.kind, t.attempt) for t in ended] == [("infra", 0)]
    assert len(log.env_seeds) == 1
    assert runner.num_retries == 0


async def test_what_fails_while_a_run_drains_does_not_count_as_too_many_failures():
    policy = ErrorPolicy(max_retries=5, retry_wait_s=60.0, min_episodes=1)
    runner = make_runner(raises(InfraError("down")), policy=policy)
    ended = []
    running = asyncio.ensure_future(runner.run(plan(make_tasks(8), 1), ended.append))
    while len(runner.in_flight) < 8:
        await asyncio.sleep(0)
    runner.drain()
    await asyncio.wait_for(running, 60)
    assert [t.error.kind for t in ended] == ["infra"] * 8


async def test_an_exception_of_on_end_ends_the_run_unchanged():
    class DiskFull(Exception):
        pass

    log = Log()
    full = DiskFull("no space")

    def on_end(_):
        raise full

    runner = make_runner(log=log, latency_s=0.01, concurrency=5)
    with pytest.raises(DiskFull) as raised:
        await runner.run(plan(make_tasks(100), 1), on_end)
    assert raised.value is full
    assert log.open == 0
    assert len(runner.setup.engine.requests) <= 10


async def test_an_exception_of_the_plan_ends_the_run_unchanged():
    def broken():
        yield PlannedEpisode(Task("q", task_id="t"), 0)
        raise LookupError("no more data")

    with pytest.raises(LookupError, match="no more data"):
        await make_runner(concurrency=2).run(broken(), lambda _: None)


async def test_an_episode_that_no_record_can_hold_fails_alone_and_is_reported_as_data(tmp_path):
    def behave(states):
        info = []
        info.append(info)
        text = [{"role": "user", "content": "x", "extra": info}] if states["label"] == "1" else "x"
        return StepResult(text, reward=1.0, terminated=True)

    runner = make_runner(behave)
    async with Outbox(RunWriter.open(tmp_path, {})) as outbox:
        await runner.run(plan(make_tasks(4), 1), outbox.append)
    kept = {trajectory.episode_id: trajectory for trajectory in read_trajectories(tmp_path)}
    assert (len(kept), runner.num_done, runner.num_failed) == (4, 4, 1)
    bad = kept.pop("t1/0")
    assert (bad.stop_reason, bad.error.kind, bad.reward) == (StopReason.ERROR, "data", None)
    assert "Put plain numbers" in bad.error.message
    assert [turn.action for turn in bad.turns] == [turn.action for turn in kept["t0/0"].turns]
    assert {trajectory.reward for trajectory in kept.values()} == {1.0}
    assert "record: DataError" in next(iter(runner.errors))
