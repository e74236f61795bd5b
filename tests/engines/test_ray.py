"""Engines in Ray actors: the same tokens, whatever dies, and nothing left behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentenv.engines import Scorer, open_engine
from agentenv.engines.hf import HFEngine
from agentenv.engines.pool import EngineDead, PoolPolicy
from agentenv.engines.ray_actor import (
    ActorSpec,
    EngineActor,
    RayConfig,
    RayEngine,
    _as_death,
    _death_told,
    open_pool,
    ray_session,
)
from agentenv.errors import ConfigError, EngineError, MissingDependency
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.types import SamplingParams
from tests.drivers import command, ids, lines
from tests.models import make_tiny_qwen2

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny")


def spec(model="none", backend="scripted", **args):
    """What runs in the actors: a scripted engine unless told otherwise."""
    return ActorSpec(backend, str(model), CharTokenizer(), "cpu", "auto", args)


def left_of_ray():
    """Living processes that Ray, or an engine in it, has started below this one."""
    found = []
    for pid in descendants(os.getpid()):
        name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if "ray" in name:
            found.append(name[:80])
    return found


def descendants(root):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    below, found = {root}, []
    while fresh := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(fresh)
        found += fresh
    return found


def actors(root):
    """Process ids of the engines' actors."""
    found = []
    for pid in descendants(root):
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::EngineActor"):
            found.append(pid)
    return found


# --- without Ray ----------------------------------------------------------------------------------------------------


async def test_without_ray_the_message_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv\[ray\]'"):
        async with open_engine("ray", "none", CharTokenizer()):
            pytest.fail("opened")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_engines": 0}, "--num_engines: expected an integer >= 1, got 0"),
        ({"cpus": -1.0}, "--engine_cpus, --engine_gpus: expected numbers >= 0"),
        ({"gpus": float("nan")}, "--engine_cpus, --engine_gpus: expected numbers >= 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        RayConfig(**flags)


def test_a_wrong_flag_ends_the_command_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(["run", "--env", "math_retry", "--engine", "ray", "--num_engines", "0"]) == 2
    assert "--num_engines: expected an integer >= 1" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["", "ray://"])
async def test_an_address_where_nothing_listens_fails_at_once(scheme):
    pytest.importorskip("ray")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{unused.getsockname()[1]}"
        async with asyncio.timeout(5):
            with pytest.raises(ConfigError, match=f"--ray_address: expected a Ray cluster at '{address}'"):
                async with open_engine("ray", "none", CharTokenizer(), ray=RayConfig(address=address)):
                    pytest.fail("opened")


def test_a_node_without_the_package_is_named():
    error = _as_death("start", RuntimeError("x\nModuleNotFoundError: No module named 'agentenv'"))
    assert isinstance(error, ConfigError)
    assert "expected agentenv" in str(error)
    assert isinstance(_as_death("start", RuntimeError("killed")), EngineDead)


def test_the_death_of_vllm_below_a_living_actor_is_told_apart_from_a_failure():
    class EngineDeadError(Exception):
        pass

    with pytest.raises(EngineDead, match="gone"), _death_told():
        raise EngineError("gone") from EngineDeadError()
    with pytest.raises(EngineError) as caught, _death_told():
        raise EngineError("only this request")
    assert type(caught.value) is EngineError


async def test_an_actor_answers_as_its_engine_does(model):
    from array import array

    actor = EngineActor(ActorSpec("hf", str(model), None, "cpu", "auto", {"max_length": 64}))
    engine = HFEngine(model, max_length=64)
    assert (await actor.start())[:2] == (os.getpid(), 0)
    ours = await engine.generate(PROMPT, GREEDY, request_id="a/0")
    assert await actor.generate(array("i", PROMPT), GREEDY, "a/0") == ours
    assert list(await actor.score(array("i", PROMPT)))[1:] == pytest.approx((await engine.score(PROMPT))[1:])
    await actor.close()
    await engine.close()


async def test_an_engine_that_was_not_started_or_is_closed_is_dead():
    pytest.importorskip("ray")
    engine = RayEngine(spec(), {})
    with pytest.raises(EngineDead, match="expected a started engine"):
        await engine.generate(PROMPT, GREEDY, request_id="a/0")
    await engine.close()


# --- with Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session():
    """One Ray for the tests below, which use it as any running one."""
    pytest.importorskip("ray")
    with ray_session(RayConfig(num_engines=2)):
        yield
    assert left_of_ray() == []


@pytest.fixture
def two(session):
    return RayConfig(num_engines=2, cpus=0.5, pool=PoolPolicy(restart_wait_s=0.01, stall_s=1.0, close_timeout_s=5))


@pytest.mark.slow
async def test_actors_give_the_tokens_of_one_engine_and_end_with_the_pool(model, two):
    engine = HFEngine(model, max_length=64)
    async with open_pool(spec(model, "hf", max_length=64), two) as pool:
        assert isinstance(pool, Scorer)
        assert len(actors(os.getpid())) == 2
        for index in range(6):
            seeded = SamplingParams(temperature=1.0, max_tokens=6, seed=index)
            ours = await engine.generate(PROMPT, seeded, request_id=f"{index}/0")
            theirs = await pool.generate(PROMPT, seeded, request_id=f"{index}/0")
            assert (theirs.token_ids, theirs.finish_reason) == (ours.token_ids, ours.finish_reason)
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
        assert (await pool.score(PROMPT))[1:] == pytest.approx((await engine.score(PROMPT))[1:], abs=1e-5)
        with pytest.raises(EngineError, match="HFEngine"):
            await pool.generate([1] * 100, GREEDY, request_id="long/0")
        assert pool.num_alive == 2
    await engine.close()
    await asyncio.sleep(0.5)
    assert actors(os.getpid()) == []


@pytest.mark.slow
async def test_weights_reach_all_actors(model, two, tmp_path):
    other = HFEngine(make_tiny_qwen2(tmp_path / "other", seed=5), max_length=64)
    weights = list(other._slots.model.state_dict().items())
    expected = (await other.generate(PROMPT, GREEDY, request_id="a/0")).token_ids
    async with open_pool(spec(model, "hf", max_length=64), two) as pool:
        before = await pool.generate(PROMPT, GREEDY, request_id="a/0")
        await pool.pause()
        await pool.update_weights(weights, 4)
        await pool.resume()
        for index in range(4):
            after = await pool.generate(PROMPT, GREEDY, request_id=f"{index}/0")
            assert (after.token_ids, after.policy_version) == (expected, 4)
        assert before.token_ids != expected
    await other.close()


@pytest.mark.slow
async def test_cancelling_reaches_the_engine_in_the_actor(two, tmp_path):
    asked, cancelled = tmp_path / "asked", tmp_path / "cancelled"

    async def say(request):
        asked.touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.touch()
            raise

    async with open_pool(spec(script=say), two) as pool:
        call = asyncio.ensure_future(pool.generate(PROMPT, GREEDY, request_id="a/0"))
        await until(asked.exists)
        call.cancel()
        await until(cancelled.exists)
        assert pool.in_flight == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "ray.kill"])
async def test_an_actor_that_is_gone_is_replaced_and_its_requests_are_served(two, how):
    import ray

    async with open_pool(spec(script=["ok"], latency_s=0.7), two) as pool:
        victim = pool._slots[0].engine
        calls = [asyncio.ensure_future(pool.generate(PROMPT, GREEDY, request_id=f"{i}/0")) for i in range(8)]
        await asyncio.sleep(0.1)
        if how == "ray.kill":
            ray.kill(victim._actor)
        else:
            os.kill(victim.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":  # nobody tells of it: the caller whose time is up does
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.generate(PROMPT, GREEDY, request_id="0/1"), 1.5)
        completions = await asyncio.wait_for(asyncio.gather(*calls), 30)
        assert len(completions) == 8
        await until(lambda: pool.num_alive == 2)
        assert pool.num_restarts == 1
        assert pool._slots[0].engine.pid != victim.pid
        await until(lambda: not Path(f"/proc/{victim.pid}").exists())


@pytest.mark.slow
async def test_what_an_actor_cannot_do_is_one_clear_error(two, model):
    with pytest.raises(ConfigError, match=r"--engine_args: expected arguments of the hf engine, got .*'nonsense'"):
        async with open_pool(spec(model, "hf", nonsense=1), two):
            pytest.fail("opened")
    with pytest.raises(ConfigError, match=r"--engine_gpus: expected 2000 GPUs for 2 engines, got \d"):
        async with open_pool(spec(), RayConfig(num_engines=2, gpus=1000)):
            pytest.fail("opened")
    crowded = RayConfig(num_engines=1, cpus=1000, pool=PoolPolicy(start_timeout_s=1.5, close_timeout_s=1))
    with pytest.raises(EngineError, match=r"expected 1 engines within 1\.5 s"):
        async with open_pool(spec(), crowded):
            pytest.fail("opened")


@pytest.mark.slow
def test_a_ray_that_was_there_stays(session):
    import ray

    with ray_session(RayConfig()):
        assert ray.is_initialized()
    assert ray.is_initialized()


async def until(condition, timeout_s=20):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


# --- the command ----------------------------------------------------------------------------------------------------


def start(*argv, cwd):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}", "PYTHONWARNINGS": "error"}
    code = "import sys; from agentenv.cli import main; sys.exit(main())"
    with (cwd / "stdout").open("w") as stdout, (cwd / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, argv)],
            cwd=cwd, env=env, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip


RUN = ("run", "--env", "math_retry", "--temperature", "0", "--json", "--max_tokens", "160")


def wait_for(process, condition, cwd, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, (cwd / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tokens(run):
    return {episode["episode_id"]: [part["token_ids"] for part in episode["segments"]] for episode in lines(run)}


@pytest.mark.slow
def test_a_run_loses_nothing_when_one_of_its_two_actors_is_killed(tmp_path):
    pytest.importorskip("ray")
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert command([*RUN, "--engine", "hf", "--out", alone]) == 0
    process = start(*RUN, "--engine", "ray", "--num_engines", 2, "--concurrency", 16, "--out", out, cwd=tmp_path)
    try:
        wait_for(process, lambda: len(lines(out)) >= 20, tmp_path)
        first = actors(process.pid)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        num_before = len(lines(out))
        assert process.wait(120) == 0, (tmp_path / "stderr").read_text()
    finally:
        process.kill()
    assert num_before < len(ids(alone)), "the run was over before the kill"
    assert ids(out) == ids(alone)
    assert len(set(ids(out))) == len(ids(out))
    assert tokens(out) == tokens(alone)
    assert all(episode["error"] is None for episode in lines(out))
    events = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("launch", "done")
    assert (tmp_path / "stderr").read_text() == ""


@pytest.mark.slow
def test_ctrl_c_drains_a_run_on_ray_and_leaves_no_process(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "out"
    process = start(*RUN, "--engine", "ray", "--num_engines", 2, "--concurrency", 8, "--out", out, cwd=tmp_path)
    try:
        wait_for(process, lambda: len(lines(out)) >= 10, tmp_path)
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, (tmp_path / "stderr").read_text()
    finally:
        process.kill()
    assert all(episode["error"] is None for episode in lines(out))
    assert "finishing" in (tmp_path / "stderr").read_text()
    deadline = time.monotonic() + 10
    while left := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert command(["run", "--resume", "--out", out, "--json", "--num_engines", 1]) == 0
    assert len(set(ids(out))) == len(lines(out)) > 10
