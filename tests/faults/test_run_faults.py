"""Whole runs: signals, kills, resumes and poor surroundings."""

import asyncio
import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import termios
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from agentenv._util.calls import call
from agentenv.core.agent import AgentInstance
from agentenv.episode.runner import ErrorPolicy, plan
from agentenv.episode.source import EnvSource
from agentenv.runs.shutdown import interruptible
from tests.drivers import command, forked, ids, lines, overriding, without_times
from tests.episode.test_runner import END, make_runner, make_tasks, run_all
from tests.faults.places import FLAGS, RESUME, make_place, rows
from tests.waits import until

ROOT = Path(__file__).parents[2]
TEN = [f"{i:06d}/0" for i in range(10)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    return make_place(tmp_path, monkeypatch)


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}"}


def cli(flags):
    """The command line in a fresh interpreter."""
    return [sys.executable, "-m", "agentenv.cli", *map(str, flags)]


# --- signals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ignored", [False, True], ids=["terminal", "nohup"])
async def test_a_terminal_that_hangs_up_again_is_no_second_ctrl_c_and_under_nohup_none_at_all(is_ignored):
    """A shell passes SIGHUP on, and when it is gone itself the kernel sends another."""
    work, runner, said = asyncio.ensure_future(asyncio.sleep(3600)), make_runner(), []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with interruptible(runner.drain, work, 3600.0, said.append) as received:
            for _ in range(3):
                signal.raise_signal(signal.SIGHUP)
            await asyncio.sleep(0.01)
            assert (received, runner.draining) == (([], False) if is_ignored else ([signal.SIGHUP], True))
            assert not work.cancelling()
            for _ in range(1 + is_ignored):
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait({work}, timeout=60)
    finally:
        for number, handler in before.items():  # after two signals, the next one would end this process
            signal.signal(number, handler)
    assert work.cancelled()
    assert len(said) == 1


async def test_a_signal_wakes_an_idle_event_loop_and_the_handlers_are_given_back():
    """Nothing else wakes this loop; and a signal whose note cannot be shown begins the grace all the same."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    runner = make_runner()
    work = asyncio.ensure_future(asyncio.sleep(3600))

    def note(text):
        raise OSError(text)

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    begun = time.monotonic()
    with interruptible(runner.drain, work, 0.0, note) as received:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        await asyncio.wait({work}, timeout=60)
    assert work.cancelled()
    assert runner.draining
    assert received == [signal.SIGTERM]
    assert time.monotonic() - begun < 45
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def on_a_terminal(flags, place, master, slave):
    """The command as the leader of a session whose terminal is `slave`."""

    def take():
        os.close(master)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        cli(flags), env=ENVIRONMENT, cwd=place, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=take,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("progress", ["live", "plain"])
def test_a_terminal_that_closes_drains_the_run_which_records_all_the_same(place, progress):
    """The kernel sends SIGHUP, and every later write to the terminal is an input/output error.

    A bug once: the first line that could not be shown ended the run, and the grace was never begun.
    """
    rows(place, ["ok"] * 200)
    flags = [*FLAGS, "--concurrency", 4, "--env_kwargs", '{"wait_s": 0.2}', "--progress", progress]
    master, slave = os.openpty()
    reader = threading.Thread(target=drained, args=(os.dup(master),), daemon=True)
    reader.start()
    running = on_a_terminal(flags, place, master, slave)
    os.close(slave)
    try:
        wait_until(lambda: len(lines(place / "out")) >= 4, running)
        os.kill(running.pid, signal.SIGSTOP)  # so that what it writes next it writes to a closed terminal
        (place / "closing").touch()
        reader.join(30)
        os.close(master)
        os.kill(running.pid, signal.SIGCONT)
        assert running.wait(280) == 129
    finally:
        running.kill()
        running.wait()
    kept = lines(place / "out")
    assert 4 <= len(kept) < 200
    assert {episode["stop_reason"] for episode in kept} == {"terminated"}
    assert json.loads((place / "out/metrics.json").read_text())["num_episodes"] == len(kept)


def drained(master):
    """Read what a terminal shows until the file `closing` is there."""
    os.set_blocking(master, False)
    while not Path("closing").exists():
        with contextlib.suppress(OSError):
            os.read(master, 65536)
        time.sleep(0.02)
    os.close(master)


def wait_until(condition, running, timeout_s=280):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert running.poll() is None, f"ended with {running.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--json"], ["--progress", "live"]])
def test_a_run_whose_reader_left_continues_to_its_end(place, more):
    argv = cli(overriding(*FLAGS, *more, "--env", "noisy.py:Noisy"))
    (place / "noisy.py").write_text(NOISY)
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": ""}
    running = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.close()
    running.stderr.close()
    try:
        assert running.wait(280) == 0
    finally:
        running.kill()
        running.wait()
    assert ids(place / "out") == TEN
    assert [episode["error"] for episode in lines(place / "out")] == [None] * 10


NOISY = """
from agentenv import AgentInstance, StepResult


class Noisy(AgentInstance):
    async def step(self, states):
        print("an environment that prints", flush=True)
        return StepResult(reward=1.0, terminated=True)
"""


# --- nothing left to do -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_resuming_a_complete_run_writes_nothing_but_metrics_that_are_lost_or_wrong(place):
    """A bug once: `metrics.json` was written anew, without the times of the session that did the work."""

    def contents():
        files = [path for path in (place / "out").rglob("*") if path.is_file()]
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    assert command(FLAGS) == 0
    before = contents()
    assert command(RESUME) == 0
    after = contents()
    assert {name for name in after if after[name] != before.get(name)} <= {".lock"}
    metrics = place / "out/metrics.json"
    good = json.loads(metrics.read_text())
    assert good["time"]["episodes_per_s"] > 0
    for bad in (None, "", "{}", json.dumps(good | {"num_episodes": 3})):
        metrics.unlink() if bad is None else metrics.write_text(bad)
        assert command(RESUME) == 0
        assert json.loads(metrics.read_text())["num_episodes"] == 10


# --- poor surroundings ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_needs_no_home_and_no_temporary_folder(place):
    poor = {"HOME": "/dev/null", "HF_HOME": "/dev/null/hf", "TMPDIR": "/dev/null", "XDG_CACHE_HOME": ""}
    done = subprocess.run(cli(FLAGS), env=ENVIRONMENT | poor, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, ids(place / "out")) == (0, TEN), done.stderr


def plain_runner(**options):
    """A runner over an environment whose step is plain, so that it runs in a thread."""

    class Plain(AgentInstance):
        def step(self, states):
            return END

    runner = make_runner(**options)
    runner.source = EnvSource(Plain, {})
    return runner


def refuse_threads(monkeypatch, times):
    """Have so many starts of threads refused as the kernel refuses them."""
    real, refused = threading.Thread.start, iter(range(times))

    def start(self):
        if next(refused, None) is not None:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)


async def test_no_thread_available_is_infrastructure(monkeypatch):
    monkeypatch.setattr("agentenv._util.calls._THREAD_WAITS_S", (0.0, 0.0))
    refuse_threads(monkeypatch, 3)
    (ended,) = await run_all(plain_runner(), plan(make_tasks(1), 1))
    assert (ended.error, ended.attempt) == (None, 1), "the first attempt had none, the second had one"
    refuse_threads(monkeypatch, 10**6)
    (ended,) = await run_all(plain_runner(policy=ErrorPolicy(0, max_error_share=1.0)), plan(make_tasks(1), 1))
    assert (ended.error.kind, ended.error.type, ended.reward) == ("infra", "InfraError", None)
    assert (
        ended.error.message.startswith("test_no_thread") or "step: expected a thread to run in" in ended.error.message
    )
    assert "ulimit -u" in ended.error.message


async def test_a_plain_call_that_ends_after_it_was_given_up_does_not_disturb_others():
    complaints, begun, may_end, ended = [], threading.Event(), threading.Event(), threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def slow():
        begun.set()
        may_end.wait(60)
        ended.set()

    work = asyncio.ensure_future(call(slow))
    await until(begun.is_set)
    work.cancel()
    await asyncio.wait({work})
    assert work.cancelled()
    thread = next(each for each in threading.enumerate() if "slow" in each.name)
    may_end.set()
    await asyncio.to_thread(thread.join, 60)
    await asyncio.sleep(0.01)
    assert ended.is_set()
    assert complaints == []


# --- killed again and again ---------------------------------------------------------------------------------------

NUMBERED = """
import asyncio
from pathlib import Path
from agentenv import AgentInstance, StepResult


class Env(AgentInstance):
    async def reset(self, states):
        with Path("order").open("a") as file:
            file.write(states["label"] + " ")
        return states

    async def step(self, states):
        await asyncio.sleep(0.1)
        return StepResult(reward=float(states["label"]), terminated=True)
"""


@pytest.mark.slow
def test_a_run_of_500_killed_at_50_moments_ends_with_each_episode_once_in_the_order_of_the_data(place):
    (place / "env.py").write_text(NUMBERED)
    rows(place, [str(i) for i in range(500)])
    flags = [*FLAGS, "--concurrency", 4]
    with forked([*flags, "--out", "whole"], place) as running:
        assert running.wait(280) == 0
    (place / "order").unlink()
    run, moments, sizes, sessions = place / "out", random.Random(19), [0], []
    record = run / "trajectories.jsonl"
    for kill in range(50):
        with forked(RESUME if kill else flags, place) as running:
            if kill % 5 == 2:  # anywhere: while it starts, or reads what is there
                time.sleep(moments.uniform(0.0, 0.6))
            else:
                running.until(lambda: record.exists() and record.read_bytes().count(b"\n") > sizes[-1])
                time.sleep(moments.uniform(0.0, 0.02))
            running.signal(signal.SIGKILL)
            running.wait()
        sizes.append(len(lines(run)))
        assert len(set(ids(run))) == len(ids(run))
        if (place / "order").exists():
            sessions.append([int(each) for each in (place / "order").read_text().split()])
            (place / "order").unlink()
    assert all(before <= after for before, after in pairwise(sizes))
    assert sum(before < after for before, after in pairwise(sizes)) >= 30
    assert sizes[-1] < 500, "a kill at the end of all proves nothing"
    with forked(RESUME, place) as running:
        assert running.wait(280) == 0
    assert ids(run) == [f"{i:06d}/0" for i in range(500)]
    assert without_times(lines(run)) == without_times(lines(place / "whole"))
    for session in sessions:
        assert session == sorted(session), "the data's order"
