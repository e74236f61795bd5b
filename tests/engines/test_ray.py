"""Engines in Ray actors: the same tokens, whatever dies, and nothing left behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv._util.ray.cluster import ClusterConfig, _env, _init, actor_death, ray_session
from agentenv.core.engine import EngineOptions
from agentenv.core.types import SamplingParams
from agentenv.engines import weights as transfer
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import load_tokenizer
from agentenv.engines.opening import open_engine
from agentenv.engines.pool import EngineDead, PoolPolicy
from agentenv.engines.ray_actor import EngineActor, RayConfig, RayEngine, _engine_death, open_pool
from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import ConfigError, ContractError, DataError, EngineError, MissingDependency
from agentenv.testing.tokenizers import CharTokenizer
from tests.drivers import command, ids, lines
from tests.models import make_tiny_qwen2
from tests.ports import held_port
from tests.waits import is_alive, until, wait_until

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny")


def options(model="none", **args):
    """Of the engines in the actors."""
    return EngineOptions(str(model), CharTokenizer(), device="cpu", args=args)


def descendants(root):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    below, found = {root}, []
    while fresh := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(fresh)
        found += fresh
    return found


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def actors(root):
    """Process ids of the engines' actors."""
    return [pid for pid in descendants(root) if command_of(pid).startswith(b"ray::EngineActor")]


# --- without Ray ----------------------------------------------------------------------------------------------------


async def test_without_ray_the_message_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv-rl\[ray\]'"):
        async with open_engine("ray", "none", CharTokenizer()):
            pytest.fail("opened")


@pytest.mark.parametrize("scheme", ["", "ray://"])
async def test_an_address_where_nothing_listens_fails_at_once(scheme):
    pytest.importorskip("ray")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{unused.getsockname()[1]}"
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match=f"--ray_address: expected a Ray cluster at '{address}'"):
                async with open_engine(
                    "ray", "none", CharTokenizer(), ray=RayConfig(cluster=ClusterConfig(address=address))
                ):
                    pytest.fail("opened")


NO_SERVER = ConnectionAbortedError("Initialization failure from server:\nTraceback\nRuntimeError: no server\n")
NO_NODE = Exception("The current node timed out during startup. This could happen because some of the raylet failed")


class BusyHead:
    """A node whose servers come up too late for the first ones that ask."""

    def __init__(self, late, error):
        self.late, self.error, self.asked = late, error, 0

    def init(self, address, **options):
        self.asked += 1
        if self.asked <= self.late:
            raise self.error


@pytest.mark.parametrize(
    ("error", "reason"), [(NO_SERVER, "^RuntimeError: no server$"), (NO_NODE, "^The current node timed out")]
)
def test_a_server_that_is_late_is_asked_again_and_one_that_never_comes_up_is_reported(error, reason):
    head = BusyHead(2, error)
    _init(head, "ray://a:1", {})
    assert head.asked == 3
    with pytest.raises(ConnectionAbortedError, match=reason):
        _init(BusyHead(9, error), "ray://a:1", {})


def test_a_node_without_the_package_is_named():
    def death(message):
        return actor_death("RayEngine.start", "--engine ray", RuntimeError(message), EngineDead)

    error = death("x\nModuleNotFoundError: No module named 'agentenv'")
    assert isinstance(error, ConfigError)
    assert "expected agentenv" in str(error)
    assert isinstance(death("killed"), EngineDead)


def test_the_death_of_vllm_in_a_living_actor_is_distinguished_from_a_failure():
    class EngineDeadError(Exception):
        pass

    with pytest.raises(EngineDead, match="gone"), _engine_death():
        raise EngineError("gone") from EngineDeadError()
    with pytest.raises(EngineError) as caught, _engine_death():
        raise EngineError("only this request")
    assert type(caught.value) is EngineError


async def test_a_bug_of_an_engine_in_an_actor_is_a_contract_error():
    from array import array

    actor = EngineActor("scripted", options())
    actor._engine = ScriptedEngine(lambda _: 1 // 0)
    with pytest.raises(ContractError, match="got ZeroDivisionError"):
        await actor.generate(array("i", PROMPT), GREEDY, "a/0")


@pytest.mark.long
async def test_an_actor_says_whether_its_engine_constrains_and_passes_the_tag_on(model):
    from array import array

    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}})
    actor = EngineActor("hf", EngineOptions(str(model), load_tokenizer(model), device="cpu", args={"max_length": 64}))
    try:
        assert (await actor.start())[-1] == ""
        answer = await actor.generate(array("i", PROMPT), replace(GREEDY, structural_tag=tag), "a/0")
        assert load_tokenizer(model).decode(answer.token_ids) == "ab<|im_end|>"
        assert len(answer.token_ids) - 1 in answer.forced
        with pytest.raises(DataError, match="structural_tag: expected one that xgrammar compiles"):
            await actor.generate(array("i", PROMPT), replace(GREEDY, structural_tag="{}"), "a/1")
    finally:
        await actor.close()


async def test_an_engine_that_was_not_started_or_is_closed_is_dead():
    pytest.importorskip("ray")
    engine = RayEngine("scripted", options(), {})
    with pytest.raises(EngineDead, match="expected a started engine"):
        await engine.generate(PROMPT, GREEDY, request_id="a/0")
    await engine.close()


def test_actors_get_the_users_runtime_environment_and_find_this_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    given = ClusterConfig(runtime_env={"working_dir": "w", "env_vars": {"A": "1"}})
    assert _env(given) == {"working_dir": "w", "env_vars": {"PYTHONPATH": f"{ROOT}:/mine", "A": "1"}}


# --- with Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session():
    """One Ray for the tests below, which use it as any running one."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_worker_niceness", raising=False)  # of `make test-slow`
        with ray_session(ClusterConfig(cpus=2)):
            yield
    # Ray waits for its raylet and its control service; the workers and agents see that these ended, and end too.
    wait_until(lambda: not any(b"ray" in command_of(pid) for pid in descendants(os.getpid())))


@pytest.fixture
def two(session):
    pool = PoolPolicy(restart_wait_s=0.01, stall_s=1.0, close_timeout_s=5)
    return RayConfig(num_engines=2, backend="scripted", cpus=0.5, pool=pool)


@pytest.mark.slow
async def test_actors_give_the_tokens_of_one_engine_take_new_weights_once_and_end_with_the_pool(
    model, two, tmp_path, monkeypatch
):
    engine = HFEngine(model, max_length=64)
    other = HFEngine(make_tiny_qwen2(tmp_path / "other", seed=5), max_length=64)
    weights = list(other._slots.model.state_dict().items())
    shares, share = [], transfer.share_weights
    monkeypatch.setattr(transfer, "share_weights", lambda named: shares.append(1) or share(named))
    async with open_pool(options(model, max_length=64), replace(two, backend="hf")) as pool:
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

        before = await pool.generate(PROMPT, GREEDY, request_id="a/0")
        expected = (await other.generate(PROMPT, GREEDY, request_id="a/0")).token_ids
        assert before.token_ids != expected
        await pool.pause()
        await pool.update_weights(weights, 4)
        await pool.resume()
        assert shares == [1]
        os.kill(pool._slots[0].engine.pid, signal.SIGKILL)
        for index in range(4):  # one of them finds out
            await pool.generate(PROMPT, GREEDY, request_id=f"{index}/0")
        await until(lambda: pool.num_restarts == 1 and pool.num_alive == 2)
        for index in range(4):
            after = await pool.generate(PROMPT, GREEDY, request_id=f"{index}/1")
            assert (after.token_ids, after.policy_version) == (expected, 4)
    await engine.close()
    await other.close()
    await until(lambda: actors(os.getpid()) == [])


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

    async with open_pool(options(script=say), two) as pool:
        call = asyncio.ensure_future(pool.generate(PROMPT, GREEDY, request_id="a/0"))
        await until(asked.exists)
        call.cancel()
        await until(cancelled.exists)
        assert pool.in_flight == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "ray.kill"])
async def test_an_actor_that_died_is_replaced_and_its_requests_are_served(two, how):
    import ray

    async with open_pool(options(script=["ok"], latency_s=2.0), two) as pool:
        victim = pool._slots[0].engine
        calls = [asyncio.ensure_future(pool.generate(PROMPT, GREEDY, request_id=f"{i}/0")) for i in range(8)]
        await asyncio.sleep(0.1)
        if how == "ray.kill":
            ray.kill(victim._actor)
        else:
            os.kill(victim.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":  # nobody tells of it: the caller whose time is up does
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.generate(PROMPT, GREEDY, request_id="0/1"), 4.0)
        completions = await asyncio.wait_for(asyncio.gather(*calls), 200)
        assert len(completions) == 8
        await until(lambda: pool.num_alive == 2)
        assert pool.num_restarts == 1
        assert pool._slots[0].engine.pid != victim.pid
        await until(lambda: not Path(f"/proc/{victim.pid}").exists())


@pytest.mark.slow
async def test_an_operation_that_an_actor_does_not_support_is_one_clear_error(two, model):
    with pytest.raises(ConfigError, match=r"--engine_args: expected arguments of the hf engine, got 'nonsense'"):
        async with open_pool(options(model, nonsense=1), replace(two, backend="hf")):
            pytest.fail("opened")
    asked = r"--num_engines, --engine_cpus, --engine_gpus: expected room for 2 times CPU 1, GPU 1000 on the cluster"
    there = r"got 1 nodes with CPU \d+, GPU \d+ together, CPU \d+, GPU \d+ of it free, the largest with CPU \d"
    with pytest.raises(ConfigError, match=f"{asked}, {there}"):
        async with open_pool(options(), RayConfig(num_engines=2, backend="scripted", gpus=1000)):
            pytest.fail("opened")


# --- the command ----------------------------------------------------------------------------------------------------


COMMAND = "import sys; from agentenv.cli.main import main; sys.exit(main())"


def start(*argv, cwd, code=COMMAND, **env):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}", "PYTHONWARNINGS": "error"} | env
    with (cwd / "stdout").open("w") as stdout, (cwd / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, argv)],
            cwd=cwd, env=env, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip


RUN = ("run", "--env", "math_retry", "--temperature", "0", "--json", "--max_tokens", "160")


def errors(tmp_path):
    """The lines on stderr, without those of a busy machine: stalls of the event loop and starts that take long."""
    lines = (tmp_path / "stderr").read_text().splitlines()
    slow = ("the event loop, on which all episodes run, is blocked", "starting ")
    return [line for line in lines if not line.startswith(slow)]


def wait_for(process, condition, cwd, timeout_s=600):
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
    short = (*RUN, "--limit", 100)
    assert command([*short, "--engine", "hf", "--out", alone]) == 0
    process = start(*short, "--engine", "ray", "--num_engines", 2, "--concurrency", 16, "--out", out, cwd=tmp_path)
    try:
        wait_for(process, lambda: len(lines(out)) >= 10, tmp_path)
        first = actors(process.pid)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        num_before = len(lines(out))
        assert process.wait(600) == 0, (tmp_path / "stderr").read_text()
    finally:
        process.kill()
    assert num_before < len(ids(alone)), "the run was over before the kill"
    assert ids(out) == ids(alone)
    assert len(set(ids(out))) == len(ids(out))
    assert tokens(out) == tokens(alone)
    assert all(episode["error"] is None for episode in lines(out))
    events = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("launch", "done")
    assert errors(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_drains_a_run_on_ray_and_leaves_no_process(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "out"
    process = start(*RUN, "--engine", "ray", "--num_engines", 1, "--concurrency", 8, "--out", out, cwd=tmp_path)
    try:
        wait_for(process, lambda: len(lines(out)) >= 10, tmp_path)
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(600) == 130, (tmp_path / "stderr").read_text()
    finally:
        process.kill()
    assert all(episode["error"] is None for episode in lines(out))
    assert "finishing" in (tmp_path / "stderr").read_text()
    wait_until(lambda: not any(map(is_alive, below)))
    assert len(set(ids(out))) == len(lines(out)) >= 10


SERVE = """
import asyncio, sys
from agentenv._util.ray.cluster import ClusterConfig
from agentenv.core.engine import EngineOptions
from agentenv.engines.ray_actor import RayConfig, open_pool
from agentenv.errors import ConfigError
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.core.types import SamplingParams

async def main():
    config = RayConfig(num_engines=2, backend="scripted", cpus=0.25, cluster=ClusterConfig(address=sys.argv[1] or None))
    spec = EngineOptions("none", CharTokenizer(), args={"script": ["hello"], "latency_s": 0.2})
    async with open_pool(spec, config) as pool:
        asked = [pool.generate([1, 2], SamplingParams(max_tokens=9), request_id=f"{i}/0") for i in range(4)]
        print(*{CharTokenizer().decode(answer.token_ids[:5]) for answer in await asyncio.gather(*asked)}, flush=True)
        try:
            await asyncio.wait_for(pool.generate([1], SamplingParams(max_tokens=9), request_id="a/0"), 0.05)
        except TimeoutError:
            print("gave up", flush=True)
        if len(sys.argv) > 2:
            await asyncio.sleep(600)

try:
    asyncio.run(main())
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
def test_killing_the_driver_ends_the_engines_and_the_ray_that_it_started(tmp_path):
    pytest.importorskip("ray")
    process = start("", "wait", cwd=tmp_path, code=SERVE, PYTHONWARNINGS="")
    try:
        wait_for(process, lambda: "gave up" in (tmp_path / "stdout").read_text(), tmp_path)
        # Ray's two agents of a node notice a minute later.
        below = [pid for pid in descendants(process.pid) if b"Agent" not in command_of(pid)]
        assert set(actors(process.pid)) < set(below)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(is_alive, below)))


# --- a cluster ------------------------------------------------------------------------------------------------------

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def cluster(session, tmp_path_factory):
    """A cluster of one node that asks for a token: its address, and the one of its client server."""
    pytest.importorskip("ray")
    with held_port() as port, held_port() as client, held_port() as dashboard, held_port() as agent:
        yield from cluster_at(port, client, dashboard, agent, tmp_path_factory)


def cluster_at(port, client, dashboard, agent, tmp_path_factory):
    options = {
        "port": port, "ray-client-server-port": client, "dashboard-port": dashboard, "include-dashboard": "false",
        "dashboard-agent-listen-port": agent, "min-worker-port": 0, "max-worker-port": 0, "num-cpus": 3,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()]
    ray = Path(sys.executable).with_name("ray")
    with (tmp_path_factory.mktemp("head") / "log").open("w+") as log:
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", "--disable-usage-stats", *flags],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 600
            while not all(listens(each) for each in (port, client)):
                assert head.poll() is None, Path(log.name).read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield {"": f"127.0.0.1:{port}", "auto": "auto", "ray://": f"ray://127.0.0.1:{client}"}
        finally:
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(60)
            head.kill()


def listens(port):
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0


LOST_NODE = """
import asyncio, json, logging, sys
from ray.cluster_utils import Cluster
from agentenv._util.ray.cluster import ClusterConfig
from agentenv.engines.pool import PoolPolicy
from agentenv.engines.ray_actor import RayConfig, open_pool
from tests.engines.test_ray import GREEDY, PROMPT, options
from tests.waits import until

async def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = {}
    try:
        lost = cluster.add_node(num_cpus=1)
        config = RayConfig(num_engines=2, backend="scripted", cpus=1.0,
                           cluster=ClusterConfig(cluster.address, placement="STRICT_SPREAD"),
                           pool=PoolPolicy(restart_wait_s=0.01, max_restarts=50, close_timeout_s=5))
        async with open_pool(options(script=["ok"], latency_s=2.0), config) as pool:
            engines = [slot.engine for slot in pool._slots]
            calls = [asyncio.ensure_future(pool.generate(PROMPT, GREEDY, request_id=f"{i}/0")) for i in range(8)]
            await asyncio.sleep(0.5)
            cluster.remove_node(lost, allow_graceful=False)
            await until(lambda: pool.num_alive == 1, 120)
            cluster.add_node(num_cpus=1)
            await until(lambda: pool.num_alive == 2, 120)
            before, after = {e.node for e in engines}, {slot.engine.node for slot in pool._slots}
            print(json.dumps([len(await asyncio.gather(*calls)), sorted(before), sorted(after)]))
    finally:
        cluster.shutdown()

logging.basicConfig(level="WARNING")
asyncio.run(main())
"""


@pytest.mark.slow
def test_an_engine_whose_node_is_lost_comes_back_on_another_and_says_where():
    pytest.importorskip("ray")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}", "RAY_AUTH_MODE": "disabled"}
    result = subprocess.run(
        [sys.executable, "-c", LOST_NODE], capture_output=True, text=True, env=env, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    num_served, before, after = json.loads(result.stdout.splitlines()[-1])
    assert num_served == 8
    (new,) = set(after) - set(before)
    assert len(before) == len(after) == 2
    assert f"is back, on node {new}" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "ray://"])
def test_a_cluster_is_reached_by_its_address_with_a_token(cluster, kind, tmp_path):
    process = start(cluster[kind], cwd=tmp_path, code=SERVE, PYTHONWARNINGS="", RAY_AUTH_TOKEN=TOKEN)
    assert process.wait(600) == 0, (tmp_path / "stderr").read_text()
    assert (tmp_path / "stdout").read_text() == "hello\ngave up\n"
    assert errors(tmp_path) == []


@pytest.mark.slow
def test_the_command_for_a_laptop_is_the_command_for_a_cluster_with_an_address(cluster, tmp_path):
    flags = ["--engine", "ray", "--num_engines", 1, "--env_actors", 1, "--limit", 8, "--out", tmp_path / "out"]
    process = start(*RUN, *flags, "--ray_address", cluster[""], cwd=tmp_path, RAY_AUTH_TOKEN=TOKEN)
    assert process.wait(600) == 0, (tmp_path / "stderr").read_text()
    assert ids(tmp_path / "out") == [f"{index:06d}/0" for index in range(8)]
    assert errors(tmp_path) == []
