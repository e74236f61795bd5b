"""The virtual clock: time jumps when nobody works, stands still while somebody does, and is the same every time."""

import asyncio
import math
import socket
import sys
import threading
import time

import pytest

from agentenv import AgentInstance, Limits, StepResult, StopReason, Task
from agentenv._util.calls import call
from agentenv.errors import ContractError
from agentenv.rewards.workers.pool import WorkerPool
from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.testing import (
    CharTokenizer,
    ScriptedEngine,
    Setup,
    VirtualClock,
    lognormal,
    play,
    run_virtual,
    simulate,
    trajectory_diff,
)
from agentenv.testing import clock as clock_module

LONG_S = 30 * 24 * 3600.0


def now():
    return asyncio.get_running_loop().time()


@pytest.fixture
def virtual_clock():
    """The plugin's, with more patience: on a busy machine, a process may take longer than 5 s to start."""
    with VirtualClock(patience_s=60.0) as clock:
        yield clock


@pytest.fixture
def clock(virtual_clock):
    return virtual_clock


def test_a_month_of_sleep_takes_no_time(clock):
    clock.run(asyncio.sleep(LONG_S))
    assert clock.elapsed_s == LONG_S


@pytest.mark.parametrize("start_s", [0.0, 2.0**24 - 0.3, 1e9])
def test_time_ends_however_late_it_is(clock, start_s):
    ten_years_s, ended = 10 * 365 * 86400.0 + 0.7, []

    async def late():
        await asyncio.sleep(start_s)
        async with asyncio.TaskGroup() as group:
            for seconds in (ten_years_s, 0.1, 1 / 3, 1e-9):
                group.create_task(asyncio.sleep(seconds)).add_done_callback(lambda _, s=seconds: ended.append(s))

    clock.run(late())
    assert ended == sorted(ended)
    assert math.isclose(clock.elapsed_s, start_s + ten_years_s, rel_tol=1e-12)
    assert clock._loop.num_jumps < 20_000


def test_run_virtual_returns_the_result_and_leaves_the_time_on_the_clock(clock):
    async def work():
        await asyncio.sleep(8.0)
        return "morning"

    assert run_virtual(work()) == "morning"
    assert run_virtual(work(), clock=clock) == "morning"
    assert clock.elapsed_s == 8.0


async def test_timeouts_end_what_is_too_slow(virtual_clock):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await asyncio.sleep(61)
    assert virtual_clock.elapsed_s == 60
    assert await asyncio.wait_for(asyncio.sleep(59, "done"), 60) == "done"
    assert virtual_clock.elapsed_s == 119


async def test_a_timeout_that_never_comes_is_not_a_reason_to_jump(virtual_clock):
    async with asyncio.timeout(math.inf):
        await asyncio.sleep(1)
    assert virtual_clock.elapsed_s == 1


def gate():
    """A plain function that works until the event is set."""
    opened = threading.Event()
    return opened, lambda: opened.wait(60)


@pytest.mark.parametrize("how", [call, asyncio.to_thread])
async def test_time_stands_still_while_a_thread_works(virtual_clock, how):
    opened, works = gate()
    jumped = asyncio.ensure_future(asyncio.sleep(3600))
    work = asyncio.ensure_future(how(works))
    threading.Timer(0.05, opened.set).start()
    assert await work is True
    assert virtual_clock.elapsed_s == 0
    await jumped
    assert virtual_clock.elapsed_s == 3600
    assert virtual_clock._loop.num_stalls == 0


@pytest.mark.long
async def test_time_stands_still_while_a_worker_process_answers(virtual_clock):
    pool = WorkerPool(num_workers=1)
    try:
        jumped = asyncio.ensure_future(asyncio.sleep(3600))
        task = "agentenv.rewards.rules.math.worker:handle"
        reply = await pool.run({"task": task, "answer": "1/2", "golds": ["0.5"]}, cpu_limit_s=2.0)
        assert reply["correct"] is True
        assert virtual_clock.elapsed_s == 0
        await jumped
    finally:
        await pool.close()


@pytest.mark.long
@pytest.mark.parametrize("pipes", [{}, {"stdout": asyncio.subprocess.PIPE}, {"stdin": asyncio.subprocess.PIPE}])
async def test_time_stands_still_while_a_process_works(virtual_clock, monkeypatch, pipes):
    monkeypatch.setattr(clock_module, "_QUIET_S", 0.02)  # of an open pipe alone it would not be known
    if "stdout" in pipes:
        process = await asyncio.create_subprocess_exec("sleep", "0.2", **pipes)
    else:
        process = await asyncio.create_subprocess_shell("sleep 0.2", **pipes)
    await asyncio.wait_for(process.communicate(b"" if "stdin" in pipes else None), 10)
    assert (process.returncode, virtual_clock.elapsed_s) == (0, 0)
    await asyncio.sleep(3600)
    assert virtual_clock._loop.num_stalls == 0


async def test_a_process_that_waits_for_our_word_holds_nothing_up(virtual_clock, monkeypatch):
    monkeypatch.setattr(clock_module, "_QUIET_S", 0.02)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    await asyncio.sleep(3600)
    assert virtual_clock._loop.num_stalls == 0
    assert await asyncio.wait_for(process.communicate(b"said"), 10) == (b"said", None)
    assert virtual_clock.elapsed_s == 3600


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
async def test_time_stands_still_while_a_session_in_a_sandbox_takes_its_turn(virtual_clock, monkeypatch):
    monkeypatch.setattr(clock_module, "_QUIET_S", 0.02)
    async with LocalSandbox() as sandbox, sandbox.session() as session:
        await asyncio.sleep(7)  # its zygote is asked meanwhile whether it lives
        turn = await asyncio.wait_for(session.run("import time; time.sleep(0.2); 6 * 7"), 10)
        assert (turn.value, virtual_clock.elapsed_s) == ("42", 7)


@pytest.mark.long
async def test_an_answer_over_a_connection_that_was_idle_is_waited_for(virtual_clock, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo_one, args=(server,)).start()
        reader, writer = await asyncio.open_connection(*server.getsockname())
        for _ in range(2):
            monkeypatch.setattr(clock_module, "_QUIET_S", 60.0)
            writer.write(b"x")
            assert await asyncio.wait_for(reader.readexactly(1), 60) == b"x"
            monkeypatch.setattr(clock_module, "_QUIET_S", 0.02)
            await asyncio.sleep(3600)
        writer.close()
        await writer.wait_closed()
    assert virtual_clock.elapsed_s == 7200


def echo_one(server):
    """Say what the first that connects says."""
    with server.accept()[0] as connection:
        while said := connection.recv(1):
            connection.sendall(said)


@pytest.mark.long
async def test_a_close_waits_for_the_holder_of_an_idle_connection(virtual_clock, monkeypatch):
    monkeypatch.setattr(clock_module, "_QUIET_S", 0.02)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(ours, heard.set)
        await asyncio.sleep(3600)
        loop.remove_reader(ours)
        monkeypatch.setattr(clock_module, "_QUIET_S", 60.0)
        loop.add_reader(ours, heard.set)
        threading.Timer(0.05, theirs.send, [b"x"]).start()
        await asyncio.wait_for(heard.wait(), 60)
        loop.remove_reader(ours)
    assert virtual_clock.elapsed_s == 3600


def test_closing_waits_for_threads_of_the_executor_however_long_they_work():
    opened, works = gate()

    async def begins():
        asyncio.get_running_loop().run_in_executor(None, works)
        await asyncio.sleep(0)

    with VirtualClock(patience_s=0.01) as clock:
        clock.run(begins())
        threading.Timer(0.1, opened.set).start()
    assert opened.is_set()


def test_a_thread_that_hangs_meets_its_deadline_and_does_not_delay_others():
    class Hangs(AgentInstance):
        def step(self, states):
            opened.wait(60)

    opened = threading.Event()

    async def others():
        for _ in range(40):
            await asyncio.sleep(1.0)

    async def work():
        setup = Setup(Hangs, ["x"], limits=Limits(step_timeout_s=30.0))
        return (await asyncio.gather(play(setup), others()))[0]

    with VirtualClock(patience_s=0.05) as clock:
        trajectory = clock.run(work())
    opened.set()
    assert trajectory.stop_reason is StopReason.STEP_TIMEOUT
    assert clock.elapsed_s == 40
    assert clock._loop.num_stalls == 2  # the step, and `close`, which waits for its thread


def test_a_wait_that_can_never_end_is_an_error():
    async def forever():
        async with asyncio.timeout(math.inf):
            await asyncio.get_running_loop().create_future()

    with VirtualClock(patience_s=0.01) as clock, pytest.raises(ContractError, match="expected a timer, thread"):
        clock.run(forever())


async def test_it_cannot_run_within_a_running_loop():
    with VirtualClock() as clock, pytest.raises(ContractError, match="expected no running event loop"):
        clock.run(asyncio.sleep(0))


# --- latencies --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_latency_depends_on_its_seed_and_request_alone():
    one, again, other = lognormal(2.0, seed=1), lognormal(2.0, seed=1), lognormal(2.0, seed=2)
    keys = [f"task/{i}/0" for i in range(2000)]
    drawn = [one(key) for key in keys]
    assert drawn == [again(key) for key in reversed(keys)][::-1]
    assert drawn != [other(key) for key in keys]
    assert min(drawn) >= 0
    assert len(set(drawn)) == len(keys)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_latencies_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="expected a number >= 0"):
        lognormal(wrong)


# --- simulations ------------------------------------------------------------------------------------------------------


class OneQuestion(AgentInstance):
    """One answer, right or wrong; a second attempt where `attempts` allows it."""

    def __init__(self, attempts=1):
        self.attempts = attempts

    async def step(self, states):
        right = states["action_text"] == states["label"]
        over = right or states["turn_index"] + 1 >= self.attempts
        return StepResult("" if over else "No. ", reward=float(right), terminated=over, score=float(right))


class Threaded(OneQuestion):
    """The same, from a plain method."""

    def step(self, states):
        time.sleep(0.0005 * (len(states["observation_text"]) % 3))
        right = states["action_text"] == states["label"]
        return StepResult(reward=float(right), terminated=True)


def speaking(latency_s=0.0, **options):
    def says(request):
        return "yes" if request.sampling.seed % 3 else "no"

    return ScriptedEngine(says, CharTokenizer(), latency_s=latency_s, **options)


def made(cls=OneQuestion, latency_s=0.0, num=1, **options):
    tasks = [Task("Q" * (i % 5 + 1), "yes") for i in range(num)]
    return Setup(cls, speaking(latency_s), data=tasks, as_messages=False, **options)


@pytest.mark.long
@pytest.mark.parametrize("cls", [OneQuestion, Threaded])
def test_the_same_seeds_produce_the_same_simulation_however_threads_interleave(cls):
    def simulated():
        setup = made(cls, latency_s=lognormal(1.0, seed=1), num=20)
        return simulate(setup, num_samples=3, concurrency=7, env_latency_s=lognormal(0.2))

    one, other = simulated(), simulated()
    assert one.elapsed_s == other.elapsed_s > 10
    assert one.durations_s == other.durations_s
    assert one.generating_s == other.generating_s
    pairs = zip(one.trajectories, other.trajectories, strict=True)
    assert not any(trajectory_diff(a, b) for a, b in pairs)


def test_figures_of_a_simulation_that_can_be_counted_by_hand():
    setup = made(latency_s=2.0, num=4)
    simulation = simulate(setup, concurrency=2, env_latency_s=lambda key: 3.0)
    assert simulation.elapsed_s == 10  # two rounds of 2 s and 3 s
    assert simulation.durations_s == (5, 5, 5, 5)
    assert simulation.generating_s == 8
    assert simulation.mean_generating == 0.8
    assert simulation.utilization == 0.4
    assert simulation.num_generations == 4
    assert (simulation.duration_s(0.0), simulation.duration_s(0.5), simulation.duration_s(1.0)) == (5, 5, 5)


def test_a_simulation_reads_what_an_engine_says_with_the_tokenizer_of_the_engine():
    simulation = simulate(Setup(OneQuestion, ScriptedEngine(["seven"])))
    assert simulation.trajectories[0].turns[0].action == "seven"


def test_a_simulation_on_a_clock_continues_from_its_time(clock):
    clock.run(asyncio.sleep(100))
    assert simulate(made(latency_s=2.0), clock=clock).elapsed_s == 2
    assert clock.elapsed_s == 102


def test_slow_steps_meet_their_deadline():
    setup = made(limits=Limits(step_timeout_s=5.0), num=2)
    simulation = simulate(setup, env_latency_s=lambda key: 10.0 if key.startswith("000001/") else 1.0)
    assert [trajectory.stop_reason for trajectory in simulation.trajectories] == [
        StopReason.TERMINATED, StopReason.STEP_TIMEOUT,
    ]  # fmt: skip
    assert simulation.durations_s == (1.0, 5.0)
