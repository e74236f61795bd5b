"""What hangs is told with its place, ended by its deadline or by the watchdog."""

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from agentenv.core.engine import Engine
from agentenv.core.types import Limits, SamplingParams, StopReason
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.episode.setup import EpisodeProgress, EpisodeSetup
from agentenv.errors import RunStopped
from agentenv.interop.openrlhf.executor import AgentExecutor, AgentFunc
from agentenv.runs import watchdog as watchdog_module
from agentenv.runs.watchdog import Watchdog
from tests.drivers import forked, ids, lines
from tests.episode.endpoint.scenes import chat_of, user
from tests.episode.test_runner import END, make_runner, make_tasks
from tests.faults.places import FLAGS, RESUME, make_place, rows

LIBRARY = Path(watchdog_module.__file__).parent


@pytest.fixture
def place(tmp_path, monkeypatch):
    return make_place(tmp_path, monkeypatch)


def make_watchdog(runner, tmp_path, *, lag=False, **options):
    """A watchdog and what it tells; without `lag`, a machine that is busy for a moment adds nothing to that."""
    told = []
    options = {"stall_timeout_s": 0.2} | options
    watchdog = Watchdog(runner, folder=tmp_path, tell=told.append, **options)
    if not lag:
        watchdog._lag._thread = threading.Thread(target=int)
    return watchdog, told


async def until_told(told):
    while not told:
        await asyncio.sleep(0.01)  # here it waits


class Deaf(Engine):
    """An engine whose `generate` never answers and ignores being cancelled, so that no deadline holds."""

    def __init__(self):
        self.release = asyncio.Event()

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        while not self.release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.release.wait()
        raise RuntimeError("released")


# --- the watchdog -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_stall_is_reported_with_what_each_episode_waits_for_and_then_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog_module, "_CANCEL_GRACE_S", 0.2)
    engine = Deaf()
    runner = make_runner(engine=engine, concurrency=3)
    runner.setup = replace(
        runner.setup, limits=type(runner.setup.limits)(200, 3, step_timeout_s=0.1, generate_timeout_s=0.1)
    )
    watchdog, told = make_watchdog(runner, tmp_path)
    begun = time.monotonic()
    with watchdog, pytest.raises(RunStopped, match=r"got none of 3 in flight.*stall-1\.txt.*--resume"):
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(9), 1), lambda _: None)))
    assert time.monotonic() - begun > 0.35
    (line,) = told
    assert re.match(r"stalled: 3 episodes in flight and none made progress for \d+\.\d", line)
    assert "waits in generate of turn 0" in line
    dump = (tmp_path / "stall-1.txt").read_text()
    waiting = [f"t{number}/0: attempt 0, generate of turn 0, 10 tokens" for number in range(3)]
    assert "\n".join(["3 wait here:", *waiting]) in dump
    assert "await self.release.wait()" in dump
    assert re.search("^Current thread .*:$", dump, re.MULTILINE)
    assert not (tmp_path / "stall-2.txt").exists()
    engine.release.set()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


@pytest.mark.long
async def test_episodes_that_continue_one_turn_at_a_time_are_not_a_stall(tmp_path):
    async def behave(states):
        await asyncio.sleep(0.8)
        return END if states["turn_index"] == 2 else type(END)("more")

    runner = make_runner(behave, concurrency=1)
    watchdog, told = make_watchdog(runner, tmp_path, stall_timeout_s=2.0)
    with watchdog:
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(2), 1), lambda _: None)))
    assert (told, list(tmp_path.iterdir()), runner.num_done) == ([], [], 2)


async def test_an_exception_of_the_run_passes_through_the_watchdog_and_leaves_no_task(tmp_path):
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
        while len(runner.setup.engine.requests) < 3:
            await asyncio.sleep(0)
        guard.cancel()
        with pytest.raises(asyncio.CancelledError):
            await guard
    assert runner.setup.engine.num_cancelled == 3
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("folder", "told_as"),
    [("absent", "stall-1.txt cannot be written"),
     ("hangs", "stall-1.txt was not written within 0.05 s.")],
)  # fmt: skip
async def test_a_disk_that_fails_or_hangs_does_not_hang_the_report_of_a_stall(tmp_path, monkeypatch, folder, told_as):
    async def behave(states):
        await until_told(told)
        return END

    monkeypatch.setattr(watchdog_module, "_WRITE_S", 0.05)
    (tmp_path / "hangs").mkdir()
    os.mkfifo(tmp_path / "hangs" / "stall-1.txt")
    runner = make_runner(behave)
    watchdog, told = make_watchdog(runner, tmp_path / folder)
    with watchdog:
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(1), 1), lambda _: None)))
    assert told_as in told[0]
    assert runner.num_done == 1
    if folder == "hangs":
        (tmp_path / "hangs" / "stall-1.txt").read_text()  # lets the thread end


# --- the event loop ---------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_call_that_blocks_the_event_loop_is_named(tmp_path):
    def blocks(until):
        end = time.monotonic() + 60
        while not until() and time.monotonic() < end:
            time.sleep(0.05)

    runner = make_runner()
    watchdog, told = make_watchdog(runner, tmp_path, stall_timeout_s=60, lag=True)
    with watchdog:
        await asyncio.sleep(0.2)
        blocks(lambda: told)
    (line,) = told
    assert re.search(r"blocked for \d+\.\d s by blocks at .*test_stalls\.py:\d+", line)
    assert "plain `def`" in line


async def test_the_watchdog_leaves_no_thread(tmp_path):
    def num():
        return sum(thread.name == "agentenv-watchdog" for thread in threading.enumerate())

    watchdog, _ = make_watchdog(make_runner(), tmp_path, lag=True)
    with watchdog:
        assert num() == 1
    assert num() == 0


# --- whole runs -----------------------------------------------------------------------------------------------------

OVERRIDE = """
import asyncio
from agentenv import StepResult
from agentenv.interop.openrlhf import AgentExecutor as Base
from env import Env


class AgentExecutor(Base):
    agent_cls = Env

    async def execute(self, *args, **kwargs):
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                pass
"""


def resumes(place, num):
    with forked(RESUME, place) as running:
        assert running.wait() == 0
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(num)]


@pytest.mark.long
def test_a_stalled_run_stops_with_3_names_the_file_and_is_resumable(place):
    """An agent_func.py whose own `execute` ignores its deadline: the watchdog's is the last one."""
    (place / "hang.py").write_text(OVERRIDE)
    flags = [
        *(each for each in FLAGS if each not in ("--env", "env.py:Env")), "--agent_func_path", "hang.py",
        "--stall_timeout_s", 1.5,
        "--step_timeout_s", 0.4, "--generate_timeout_s", 0.4, "--episode_timeout_s", 1.0,
    ]  # fmt: skip
    with forked(flags, place) as running:
        assert running.wait() == 3
        stderr = running.stderr
    assert stderr.count("stalled: 10 episodes in flight") == 1
    assert "stall-1.txt" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert "await asyncio.sleep(3600)" in (place / "out/stall-1.txt").read_text()
    assert lines(place / "out") == []
    (place / "hang.py").write_text(OVERRIDE.partition("    async def execute")[0])
    resumes(place, 10)


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


@pytest.mark.long
def test_a_third_signal_ends_a_run_whose_event_loop_is_blocked(place):
    """A bug once: asyncio's signal handlers run on the loop, so that Ctrl-C did nothing there."""
    (place / "env.py").write_text(BLOCKING)
    rows(place, ["ok"] * 3 + ["hang"])
    with forked([*FLAGS, "--concurrency", 1], place) as running:
        running.until((place / "started").exists)
        running.until(lambda: "blocked for" in running.stderr)
        running.signal_until_dead(signal.SIGINT)
        assert running.wait() == -signal.SIGINT
        assert re.search(r"by step at .*env\.py:11", running.stderr)
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(3)]


@pytest.mark.long
def test_a_run_whose_event_loop_is_blocked_for_good_ends_with_3_and_names_the_line(place):
    """No deadline can end it: they all run on that loop."""
    (place / "env.py").write_text(BLOCKING)
    rows(place, ["ok"] * 3 + ["hang"])
    limits = ["--stall_timeout_s", 1.0, "--step_timeout_s", 1.0, "--generate_timeout_s", 1.0]
    with forked([*FLAGS, "--concurrency", 1, *limits], place) as running:
        assert running.wait(280) == 3
        assert re.search(r"error: event loop: expected it to be free .* by step at .*env\.py:11", running.stderr)
        assert "--resume" in running.stderr
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(3)]
    (place / "env.py").write_text(BLOCKING.replace("time.sleep(3600)", "pass"))
    resumes(place, 4)


HOLDS_THE_GIL = BLOCKING.replace("async def", "def").replace(
    "time.sleep(3600)", "import ctypes; ctypes.PyDLL(None).sleep(3600)"
)


@pytest.mark.long
def test_native_code_that_keeps_the_gil_is_dumped_and_what_ended_before_is_kept(place):
    """Nothing inside the process can end this: a thread of Python cannot run, nor a signal handler. SIGKILL, resume."""
    (place / "env.py").write_text(HOLDS_THE_GIL)
    rows(place, ["ok"] * 3 + ["hang"])
    with forked([*FLAGS, "--concurrency", 1, "--stall_timeout_s", 0.5], place) as running:
        running.until((place / "started").exists)
        running.until(lambda: "Timeout (" in running.stderr)
        running.until(lambda: 'env.py", line 11 in step' in running.stderr)
        running.signal(signal.SIGKILL)
        running.wait()
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(3)]
    (place / "env.py").write_text(HOLDS_THE_GIL.replace("sleep(3600)", "getpid()"))
    resumes(place, 4)


# --- time ---------------------------------------------------------------------------------------------------


class Hands:
    """The clocks of `watchdog.py`, turned by hand: `monotonic` goes on by `step_s` at every look on the loop."""

    strftime = staticmethod(time.strftime)

    def __init__(self, step_s=0.0):
        self.now_s, self.step_s, self.looks, self.heard = 1_000.0, step_s, 0, 0
        self.loop_thread = threading.get_ident()

    def monotonic(self):
        if threading.get_ident() == self.loop_thread:
            self.looks += 1
            self.now_s += self.step_s
            return self.now_s
        now_s = self.now_s
        self.heard += 1  # last: who waits for it may turn the hands further
        return now_s

    def time(self):
        return 1e9 * (-1) ** self.looks  # as wrong as can be

    def wait_until_heard(self, times):
        """Hold the event loop up until the listening thread has looked at the clock so many times more."""
        until, end = self.heard + times, time.monotonic() + 60
        while self.heard < until:
            assert time.monotonic() < end
            time.sleep(0.002)


@pytest.mark.parametrize(("step_s", "told_at", "stopped_at"), [(1 / 128, 10, 18), (3600.0, 6, 10)])
async def test_a_stall_is_counted_in_looks_so_that_a_stopped_process_is_none(
    tmp_path, monkeypatch, step_s, told_at, stopped_at
):
    """Eight looks make a stall timeout; an hour between two of them counts as two looks, and not as an hour."""
    hands = Hands(step_s)
    monkeypatch.setattr(watchdog_module, "time", hands)
    runner = make_runner()
    runner.in_flight["t0/0"] = EpisodeProgress(asyncio.current_task())  # one that never goes on
    runner.setup = replace(
        runner.setup, limits=type(runner.setup.limits)(200, 3, step_timeout_s=1 / 16, generate_timeout_s=1 / 16)
    )
    looks = []
    watchdog = Watchdog(runner, folder=tmp_path, stall_timeout_s=1 / 16, tell=lambda _: looks.append(hands.looks))
    watchdog._lag.arm = lambda seconds: None
    with pytest.raises(RunStopped, match="got none of 1 in flight"):
        await asyncio.wait_for(watchdog.watch(), 60)
    # The first look sets the clock; the next one sees an episode that was not there before.
    assert (looks[0], hands.looks) == (told_at, stopped_at)


async def test_nothing_in_flight_is_not_a_stall(tmp_path, monkeypatch):
    """Between episodes a run may wait for its data, as long as that takes."""
    hands = Hands(3600.0)
    monkeypatch.setattr(watchdog_module, "time", hands)
    watchdog, told = make_watchdog(make_runner(), tmp_path, stall_timeout_s=1 / 16)
    watchdog._lag.arm = lambda seconds: None
    watching = asyncio.ensure_future(watchdog.watch())
    while hands.looks < 30 and not watching.done():
        await asyncio.sleep(0.005)
    watching.cancel()
    await asyncio.wait({watching})
    assert watching.cancelled()
    assert told == []


@pytest.mark.long
async def test_time_in_which_the_process_was_stopped_is_not_a_lag(tmp_path, monkeypatch):
    hands = Hands()
    monkeypatch.setattr(watchdog_module, "time", hands)
    monkeypatch.setattr(watchdog_module, "_BEAT_S", 0.01)
    watchdog, told = make_watchdog(make_runner(), tmp_path, stall_timeout_s=2.0, lag=True)
    with watchdog:
        hands.wait_until_heard(2)
        hands.now_s += 3600  # all at once: nobody ran meanwhile
        hands.wait_until_heard(3)
        assert told == []
        await asyncio.sleep(0.3)  # the loop beats
        for _ in range(200):  # the listener runs on, the loop does not, for more than a minute
            hands.now_s += 0.4
            hands.wait_until_heard(1)
    assert [line.partition(", on which")[0] for line in told] == ["the event loop"] * 2
    assert re.search(r"blocked for 1\.[0-4] s", told[0])


# --- agents with a loop of their own ------------------------------------------------------------------------------


class Slow:
    """Asks the endpoint again and again, longer in all than a stall may be."""

    pause_s = 1.0

    async def run(self, context):
        async with httpx.AsyncClient(base_url=context.base_url, timeout=60) as http:
            messages = context.messages
            for _ in range(6):
                answer = await http.post("chat/completions", json={"messages": messages})
                messages = [*messages, answer.raise_for_status().json()["choices"][0]["message"], user("more")]
                await asyncio.sleep(self.pause_s)
        return 1.0


class SlowFile(AgentExecutor):
    """Asks its engine again and again; from outside nothing is seen of that."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, **_):
        tokens = hf_tokenizer.encode(prompt)
        for _ in range(6):
            said = (await llm_engine.generate(tokens, sampling_params)).outputs[0].token_ids
            await asyncio.sleep(1.0)
        spans = [(len(tokens), len(tokens) + len(said))]
        return {"observation_tokens": tokens + said, "action_ranges": spans, "reward": 1.0}


def own_loops(source):
    chat = chat_of("Qwen3")
    limits = Limits(max_length=4096, step_timeout_s=3, generate_timeout_s=3, episode_timeout_s=600)
    return EpisodeRunner(
        source,
        EpisodeSetup(
            engine=ScriptedEngine(["41"], chat.tokenizer), chat=chat, sampling=SamplingParams(), limits=limits
        ),
        concurrency=2,
        policy=ErrorPolicy(max_retries=0),
    )


@pytest.mark.long
@pytest.mark.parametrize("make", [lambda: ChatAgentSource(Slow), lambda: AgentFunc(SlowFile)], ids=["agent", "file"])
async def test_agents_with_their_own_loop_are_not_stopped_while_their_deadline_is_not_over(make, tmp_path):
    runner, ended = own_loops(make()), []
    watchdog, _ = make_watchdog(runner, tmp_path, stall_timeout_s=0.9)
    with watchdog:
        await watchdog.guard(asyncio.ensure_future(runner.run(plan(make_tasks(2), 1), ended.append)))
    assert [trajectory.error for trajectory in ended if trajectory.stop_reason is not StopReason.TERMINATED] == []
    assert len(ended) == 2
