"""Faults 3, 9, 24, 26 and 31: what hangs is told with its place, ended by its deadline or by the watchdog."""

import asyncio
import contextlib
import re
import signal
import time
from pathlib import Path

import pytest

from agentenv import watchdog as watchdog_module
from agentenv.errors import RunStopped
from agentenv.runner import plan
from agentenv.watchdog import Watchdog
from tests.drivers import forked, ids, lines
from tests.faults.places import FLAGS, RESUME, make_place, rows
from tests.test_runner import END, make_runner, make_tasks

LIBRARY = Path(watchdog_module.__file__).parent


@pytest.fixture
def place(tmp_path, monkeypatch):
    return make_place(tmp_path, monkeypatch)


def make_watchdog(runner, tmp_path, **options):
    told = []
    options = {"stall_timeout_s": 0.2} | options
    return Watchdog(runner, folder=tmp_path, tell=told.append, **options), told


class Deaf:
    """An engine whose `generate` never answers and ignores being cancelled, so that no deadline holds."""

    def __init__(self):
        self.release = asyncio.Event()

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        while not self.release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.release.wait()
        raise RuntimeError("released")


# --- the watchdog -------------------------------------------------------------------------------------------------


async def test_a_stall_is_told_with_what_each_episode_waits_for_and_then_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog_module, "_CANCEL_GRACE_S", 0.2)
    engine = Deaf()
    runner = make_runner(engine=engine, concurrency=3)
    runner.limits = type(runner.limits)(200, 3, step_timeout_s=0.1, generate_timeout_s=0.1)
    watchdog, told = make_watchdog(runner, tmp_path)
    begun = time.monotonic()
    with watchdog, pytest.raises(RunStopped, match=r"got none of 3 in flight.*stall-1\.txt.*--resume"):
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(9), 1), lambda _: None)))
    assert 0.35 < time.monotonic() - begun < 3
    (line,) = told
    assert line.startswith("stalled: 3 episodes in flight and none went on for 0.2")
    assert "waits in generate of turn 0" in line
    dump = (tmp_path / "stall-1.txt").read_text()
    assert re.search(r"^t0/0 +0 generate +0 +10 +0\.\d$", dump, re.MULTILINE)
    assert "3 wait here: t0/0, t1/0, t2/0" in dump
    assert "await self.release.wait()" in dump
    assert "thread MainThread" in dump
    assert not (tmp_path / "stall-2.txt").exists()
    engine.release.set()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


async def test_the_stack_goes_on_into_the_environments_own_code(tmp_path):
    async def behave(states):
        await asyncio.sleep(0.6)  # here it waits
        return END

    runner = make_runner(behave, concurrency=2)
    watchdog, told = make_watchdog(runner, tmp_path, stall_timeout_s=0.3)
    with watchdog:
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(2), 1), lambda _: None)))
    assert len(told) == 1
    dump = (tmp_path / "stall-1.txt").read_text()
    assert re.search(r"^t1/0 +0 step +0 ", dump, re.MULTILINE)
    assert "await asyncio.sleep(0.6)  # here it waits" in dump


async def test_episodes_that_go_on_one_turn_at_a_time_are_no_stall(tmp_path):
    async def behave(states):
        await asyncio.sleep(0.15)
        return END if states["turn_index"] == 2 else type(END)("more")

    runner = make_runner(behave, concurrency=1)
    watchdog, told = make_watchdog(runner, tmp_path, stall_timeout_s=0.3)
    with watchdog:
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(3), 1), lambda _: None)))
    assert (told, list(tmp_path.iterdir()), runner.num_done) == ([], [], 3)


async def test_a_record_that_cannot_be_written_for_long_is_a_stall_as_well(tmp_path):
    async def on_end(_):
        await asyncio.sleep(0.5)

    runner = make_runner(concurrency=1)
    watchdog, told = make_watchdog(runner, tmp_path)
    with watchdog:
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(1), 1), on_end)))
    assert len(told) == 1
    assert "waits in runner of turn 0" in told[0]
    assert "on_end" in (tmp_path / "stall-1.txt").read_text()


async def test_what_the_run_raises_comes_through_the_watchdog_and_leaves_no_task(tmp_path):
    def on_end(_):
        raise LookupError("no more")

    runner = make_runner()
    watchdog, _ = make_watchdog(runner, tmp_path)
    with watchdog, pytest.raises(LookupError, match="no more"):
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(3), 1), on_end)))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_the_watchdog_cancels_the_run(tmp_path):
    runner = make_runner(latency_s=60.0)
    watchdog, _ = make_watchdog(runner, tmp_path, stall_timeout_s=60)
    with watchdog:
        guard = asyncio.ensure_future(watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(3), 1), print))))
        while len(runner.engine.requests) < 3:
            await asyncio.sleep(0)
        guard.cancel()
        with pytest.raises(asyncio.CancelledError):
            await guard
    assert runner.engine.num_cancelled == 3
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_dump_that_cannot_be_written_is_told_and_does_no_harm(tmp_path):
    async def behave(states):
        await asyncio.sleep(0.5)
        return END

    runner = make_runner(behave)
    watchdog, told = make_watchdog(runner, tmp_path / "absent")
    with watchdog:
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(1), 1), lambda _: None)))
    assert "stall-1.txt cannot be written" in told[0]
    assert runner.num_done == 1


# --- 31: the event loop ---------------------------------------------------------------------------------------------


async def test_who_holds_the_event_loop_up_is_named_once_a_minute(tmp_path):
    def blocks():
        time.sleep(1.4)

    runner = make_runner()
    watchdog, told = make_watchdog(runner, tmp_path, stall_timeout_s=60)
    with watchdog:
        for _ in range(2):
            await asyncio.sleep(0.2)
            blocks()
    (line,) = told
    assert re.search(r"held up for 1\.\d s by blocks at .*test_stalls\.py:\d+", line)
    assert "plain `def`" in line


async def test_a_loop_that_is_held_up_for_the_stall_timeout_is_dumped_from_outside(tmp_path):
    runner = make_runner()
    watchdog, told = make_watchdog(runner, tmp_path, stall_timeout_s=0.5)
    with watchdog:
        time.sleep(0.9)
    assert [line[:37] for line in told] == ["stalled: the event loop is held up fo"]
    dump = (tmp_path / "stall-1.txt").read_text()
    assert "time.sleep(0.9)" in dump


async def test_the_watchdog_leaves_no_thread(tmp_path):
    import threading

    before = threading.active_count()
    watchdog, _ = make_watchdog(make_runner(), tmp_path)
    with watchdog:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


# --- whole runs -----------------------------------------------------------------------------------------------------

OVERRIDE = """
import asyncio
from agentenv import StepResult
from agentenv.executor import AgentExecutor as Base
from env import Env


class AgentExecutor(Base):
    agent_cls = Env

    async def execute(self, *args, **kwargs):
        await asyncio.sleep(3600)
"""


def test_a_stalled_run_stops_with_3_names_the_file_and_is_resumable(place):
    """An agent_func.py whose own `execute` hangs has no deadline of ours: the watchdog is the last one."""
    (place / "hang.py").write_text(OVERRIDE)
    flags = [
        *(each for each in FLAGS if each not in ("--env", "env.py:Env")), "--agent_func_path", "hang.py",
        "--stall_timeout_s", 0.4,
        "--step_timeout_s", 0.4, "--generate_timeout_s", 0.4, "--episode_timeout_s", 3600,
    ]  # fmt: skip
    with forked(flags, place) as running:
        assert running.wait(40) == 3
        stderr = running.stderr
    assert stderr.count("stalled: 10 episodes in flight") == 1
    assert "stall-1.txt" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert "await asyncio.sleep(3600)" in (place / "out/stall-1.txt").read_text()
    assert lines(place / "out") == []
    (place / "hang.py").write_text(OVERRIDE.partition("    async def execute")[0])
    with forked(RESUME, place) as running:
        assert running.wait() == 0
    assert len(set(ids(place / "out"))) == len(ids(place / "out")) == 10


BLOCKING = """
import time
from pathlib import Path
from agentenv import AgentInstance, StepResult


class Env(AgentInstance):
    async def step(self, states):
        if states["label"] == "hang":
            Path("started").touch()
            time.sleep(3600)
        return StepResult(reward=1.0, terminated=True)
"""


def test_a_third_signal_ends_a_run_whose_event_loop_is_blocked(place):
    """A bug once: asyncio's signal handlers run on the loop, so that Ctrl-C did nothing there."""
    (place / "env.py").write_text(BLOCKING)
    rows(place, ["ok"] * 3 + ["hang"])
    with forked([*FLAGS, "--concurrency", 1], place) as running:
        running.until((place / "started").exists)
        running.until(lambda: "held up for" in running.stderr, 10)
        for _ in range(3):
            running.signal(signal.SIGINT)
            time.sleep(0.2)
        assert running.wait(5) == -signal.SIGINT
        assert re.search(r"by step at .*env\.py:11", running.stderr)
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(3)]


HOLDS_THE_GIL = BLOCKING.replace("async def", "def").replace(
    "time.sleep(3600)", "import ctypes; ctypes.PyDLL(None).sleep(3600)"
)


def test_native_code_that_keeps_the_gil_is_dumped_and_what_ended_before_is_kept(place):
    """Nothing inside the process can end this: a thread of Python cannot run, nor a signal handler. SIGKILL, resume."""
    (place / "env.py").write_text(HOLDS_THE_GIL)
    rows(place, ["ok"] * 3 + ["hang"])
    with forked([*FLAGS, "--concurrency", 1, "--stall_timeout_s", 0.5], place) as running:
        running.until((place / "started").exists)
        running.until(lambda: "Timeout (" in running.stderr, 20)
        time.sleep(0.2)
        assert 'env.py", line 11 in step' in running.stderr
        running.signal(signal.SIGKILL)
        running.wait()
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(3)]
    (place / "env.py").write_text(HOLDS_THE_GIL.replace("sleep(3600)", "getpid()"))
    with forked(RESUME, place) as running:
        assert running.wait() == 0
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(4)]


# --- 24, 26: time ---------------------------------------------------------------------------------------------------


def test_deadlines_and_intervals_are_measured_with_clocks_that_never_jump():
    """`time.time()` may name a file or read a server's date; nothing may wait by it."""
    users = {
        f"{path.relative_to(LIBRARY)}:{line.strip()}"
        for path in LIBRARY.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\btime\.time(_ns)?\(|datetime\.now\(|utcnow\(", line)
    }
    waits = {each for each in users if "Retry" not in each and "parsedate_to_datetime" not in each}
    assert {each for each in waits if "created" not in each} == set()


def test_a_run_under_a_jumping_clock_is_as_any_other(place, monkeypatch):
    offset = iter(range(0, 10**9, 3600))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** (n := next(offset)) * n)
    from tests.drivers import command

    assert command([*FLAGS, "--step_timeout_s", 5]) == 0
    assert len(ids(place / "out")) == 10


def test_a_run_that_is_stopped_and_continued_dispatches_nothing_twice_and_stalls_not(place):
    """Shorter than the issue's minute, and longer than the stall timeout, which does not count the stopped time."""
    rows(place, ["ok"] * 40)
    flags = [*FLAGS, "--concurrency", 4, "--env_kwargs", '{"wait_s": 0.1}', "--stall_timeout_s", 1.0]
    with forked(flags, place) as running:
        running.until(lambda: len(lines(place / "out")) >= 4)
        running.signal(signal.SIGSTOP)
        time.sleep(2.5)
        running.signal(signal.SIGCONT)
        assert running.wait(60) == 0
        assert "stalled" not in running.stderr
        assert "held up" not in running.stderr
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(40)]
    assert (place / "started").read_text() == "x" * 40
    assert {episode["attempt"] for episode in lines(place / "out")} == {0}
