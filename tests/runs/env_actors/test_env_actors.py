"""Environments in Ray actors: the same episodes, whatever an actor does, and nobody pays for a neighbour."""

import asyncio
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from agentenv._util.paths import traceback_of
from agentenv._util.ray.cluster import ClusterConfig, ray_session
from agentenv.chat.chat import Chat
from agentenv.core.types import Limits, SamplingParams, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.registry import load_env, load_file
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError, InfraError, MissingDependency
from agentenv.runs.config import RunConfig
from agentenv.runs.env_actors.actors import EnvActorConfig
from agentenv.runs.env_actors.host import EnvActor, EnvSpec, Failure
from agentenv.runs.env_actors.source import RemoteEnv, in_actors, open_actors
from agentenv.testing.tokenizers import CharTokenizer
from tests.drivers import command, ids, lines, write_rows

HERE = Path(__file__).parent
SCENE = HERE / "scene.py"
FILES = HERE.parents[1] / "interop" / "agent_funcs"
ONCE = ErrorPolicy(max_retries=0)
LIMITS = Limits(max_length=512, max_turns=4, step_timeout_s=30)


# --- without Ray ----------------------------------------------------------------------------------------------------


def test_a_source_without_actors_is_itself():
    async def check():
        source = EnvSource(load_env(f"{SCENE}:Scene"))
        async with in_actors(source, RunConfig.from_flags(env="math_retry"), CharTokenizer()) as same:
            assert same is source

    asyncio.run(check())


@pytest.mark.parametrize("flag", ["--env_actors", "--env_actor_cpus"])
def test_numbers_that_mean_nothing_are_refused(flag, capsys):
    assert command(["run", "--env", "math_retry", flag, "-1"]) == 2
    assert f"{flag}: expected a" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_without_ray_the_message_has_the_command_that_installs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert command(["run", "--env", "math_retry", "--env_actors", "1"]) == MissingDependency.exit_code
    assert "pip install 'agentenv-rl[ray]'" in " ".join(capsys.readouterr().err.split())


def test_an_agent_with_its_own_loop_is_refused():
    async def check():
        config = RunConfig.from_flags(env="math_retry", env_actors=1)
        async with in_actors(object(), config, CharTokenizer()):
            pytest.fail("opened")

    with pytest.raises(ConfigError, match="--env_actors: expected an environment with `step`"):
        asyncio.run(check())


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ValueError("x"), ValueError),
        (InfraError("x"), InfraError),
        (DataError("x"), DataError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), UnicodeDecodeError),
        (KeyError("x"), KeyError),
        (ExceptionGroup("unhandled errors", [ValueError("inner")]), Exception),
        (asyncio.CancelledError(), Exception),
        (SystemExit(3), Exception),
        (OSError(28, "full"), OSError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_an_exception_that_crossed_is_of_the_same_name_kind_message_and_place(error, base):
    try:
        raise error
    except BaseException as raised:
        failure = pickle.loads(pickle.dumps(Failure.of(raised)))
    made = failure.error()
    assert type(made).__name__ == type(error).__name__
    assert isinstance(made, base)
    assert str(made) == (str(error) or repr(error))
    assert made.place.startswith(f"{__file__}:")
    assert "Traceback" in made.__notes__[0]
    assert f'File "{__file__}"' in traceback_of(made)


def test_an_exception_of_a_users_own_class_crosses_as_its_builtin_base():
    own = load_file(SCENE).OwnError("this", "that")
    made = Failure.of(own).error()
    assert (type(made).__name__, str(made)) == ("OwnError", "this and that")
    assert isinstance(made, ValueError)


async def test_an_actor_makes_asks_and_closes_agents_by_number(tmp_path):
    actor = EnvActor(EnvSpec(env=f"{SCENE}:Scene"))
    pid, _, name, _ = await actor.start()
    assert (pid, name) == (os.getpid(), "Scene")
    assert await actor.make(1, {"marks": str(tmp_path)}) is None
    assert (await actor.ask(1, "step", {"label": "play"})).reward == 1.0
    assert (await actor.ask(1, "step", {"label": "own_error"})).name == "OwnError"
    assert (await actor.make(2, {"fails": True})).name == "KeyError"
    assert await actor.ping() == 1
    assert await actor.drop(1) is None
    assert await actor.drop(1) is None
    assert len(list(tmp_path.iterdir())) == 1
    assert await actor.ping() == 0


async def test_cancelling_a_call_in_the_actor_is_not_a_failure(tmp_path):
    actor = EnvActor(EnvSpec(env=f"{SCENE}:Scene"))
    await actor.start()
    await actor.make(1, {"marks": str(tmp_path)})
    call = asyncio.ensure_future(actor.ask(1, "step", {"label": "wait"}))
    while not (tmp_path / "asked").exists():
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (tmp_path / "cancelled").exists()


def test_a_file_is_found_from_the_folder_of_the_command_or_from_the_actors_own(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.py").write_text(SCENE.read_text())
    assert EnvSpec(env="mine.py:Scene", folder=str(tmp_path / "there")).load().__name__ == "Scene"
    monkeypatch.chdir(tmp_path / "there")  # as Ray's working_dir has it on another node
    assert EnvSpec(env="mine.py:Scene", folder="/not/on/this/node").load().__name__ == "Scene"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"expected /not/on/this/node/mine\.py on every node.*working_dir"):
        EnvSpec(env="mine.py:Scene", folder="/not/on/this/node").load()


def test_a_module_has_the_same_name_in_every_process():
    assert load_file(SCENE).__name__ == f"agentenv_file_scene_{crc32(str(SCENE).encode()):x}"


@pytest.mark.parametrize("file", ["template.py", "math_agent.py", "game.py", "own_loop_queue.py"])
def test_the_class_of_an_agent_func_is_found_without_an_engine(file):
    spec = EnvSpec(agent_func_path=str(FILES / file), tokenizer=CharTokenizer())
    assert hasattr(spec.load(), "step")


def test_a_file_that_names_no_agent_class_is_refused():
    with pytest.raises(ConfigError, match="Leave --env_actors out: the file runs its own loop"):
        EnvSpec(agent_func_path=str(FILES / "own_loop.py"), tokenizer=CharTokenizer()).load()


# --- with Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session():
    """One Ray for the tests below, which use it as any running one."""
    pytest.importorskip("ray")
    with ray_session(ClusterConfig(cpus=2)):
        yield


@pytest.fixture
def config(session):
    return EnvActorConfig(num=2, cpus=0.5, restart_wait_s=0.01)


async def episodes(actors, labels, *, limits=LIMITS, policy=ONCE, **kwargs):
    """The records of one episode for each label, by task id."""
    tasks = [Task("go", label, task_id=str(index)) for index, label in enumerate(labels)]
    runner = EpisodeRunner(
        RemoteEnv(actors, kwargs),
        EpisodeSetup(
            engine=ScriptedEngine(["yes"], CharTokenizer()),
            chat=Chat(CharTokenizer()),
            sampling=SamplingParams(max_tokens=8, seed=0),
            limits=limits,
        ),
        policy=policy,
    )
    ended = {}
    await runner.run(plan(tasks, 1), lambda trajectory: ended.update({trajectory.group_id: trajectory}))
    return [ended[task.task_id] for task in tasks]


def scene(name="Scene"):
    return EnvSpec(env=f"{SCENE}:{name}")


@pytest.mark.slow
async def test_episodes_are_spread_over_the_actors_and_end_as_in_this_process(config, tmp_path):
    async with open_actors(scene(), config) as actors:
        ended = await episodes(actors, ["play"] * 8, marks=str(tmp_path))
        assert len(actors.pids) == 2
        assert [each.reward for each in ended] == [2.0] * 8
        pids = Counter(int(each.turns[-1].result.info["pid"]) for each in ended)
        assert pids == dict.fromkeys(actors.pids, 4)
        assert len(list(tmp_path.glob("closed-*"))) == 8
        assert [host.life.num_agents for host in actors._hosts] == [0, 0]
        [cut] = await episodes(actors, ["play"], limits=Limits(max_length=512, max_turns=1))
        assert (cut.stop_reason, cut.reward, cut.score) == (StopReason.MAX_TURNS, 1.5, 0.25)


@pytest.mark.slow
async def test_an_exception_of_an_environment_is_recorded_as_in_this_process(config):
    labels = ["own_error", "infra", "cancelled"]
    here = []
    for label in labels:
        task = Task("go", label)
        cls = load_env(f"{SCENE}:Scene")

        async def make(cls=cls):
            return cls()

        here.append(
            await run_episode(
                make, task, engine=ScriptedEngine(["yes"], CharTokenizer()), chat=Chat(CharTokenizer()),
                sampling=SamplingParams(max_tokens=8), limits=LIMITS, key=EpisodeKey(),
            )
        )  # fmt: skip
    async with open_actors(scene(), config) as actors:
        there = await episodes(actors, labels)
        assert [each.error for each in there] == [each.error for each in here]
        assert there[0].error.place.startswith(f"{SCENE}:")
        assert [each.error.kind for each in there] == ["env", "infra", "env"]
        [wrong] = await episodes(actors, ["play"], fails=True)
        assert (wrong.error.type, wrong.error.where) == ("KeyError", "create")
        assert wrong.error.place.startswith(f"{SCENE}:")
        lock, own = await episodes(actors, ["lock", "own"])
        assert lock.error.kind == "contract"
        assert "Scene.step: expected data that can be pickled" in lock.error.message
        assert own.error is None  # a class of the user's file is the same class here
        assert actors.num_restarts == 0


@pytest.mark.slow
async def test_exit_codes_of_subprocesses_are_what_they_are_here_and_in_the_actors(config):
    assert subprocess.run("false", check=False).returncode == 1
    adopts = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)
    assert adopts.value == 0, "this process would collect the zombies of actors"
    async with open_actors(scene(), config) as actors:
        [ended] = await episodes(actors, ["run false"])
        assert ended.turns[-1].result.info == {"code": 1.0}


@pytest.mark.slow
async def test_a_deadline_cancels_the_call_in_the_actor(config, tmp_path):
    async with open_actors(scene(), config) as actors:
        [late] = await episodes(
            actors, ["wait"], limits=Limits(max_length=512, max_turns=4, step_timeout_s=2), marks=str(tmp_path)
        )
        assert late.stop_reason == StopReason.STEP_TIMEOUT
        assert "Scene.step: expected an answer within 2 s" in late.error.message
        await until((tmp_path / "cancelled").exists)
        assert len(list(tmp_path.glob("closed-*"))) == 1
        assert actors.num_restarts == 0


@pytest.mark.slow
async def test_plain_methods_that_sleep_run_side_by_side(config):
    async with open_actors(scene("Plain"), config) as actors:
        started = time.monotonic()
        ended = await episodes(actors, ["2.0"] * 24)
        assert time.monotonic() - started < 24  # one after the other: 48 s, or 24 s in each of two
        assert all(each.error is None for each in ended)


@pytest.mark.slow
async def test_an_actor_that_is_killed_is_replaced_and_its_episodes_are_run_again(config, tmp_path):
    async with open_actors(scene(), config) as actors:
        before = actors.pids
        labels = ["die", *["play"] * 9]
        ended = await episodes(
            actors, labels, policy=ErrorPolicy(max_retries=2, retry_wait_s=0.05), marks=str(tmp_path)
        )
        assert [each.error for each in ended] == [None] * 10
        assert [each.reward for each in ended] == [2.0] * 10
        assert ended[0].attempt == 1
        await until(lambda: len(actors.pids) == 2)
        assert actors.num_restarts == 1
        assert len(set(before) & set(actors.pids)) == 1
        [dead] = await episodes(actors, ["die"], marks=str(make_folder(tmp_path / "again")))
        assert dead.error.kind == "infra"
        assert "Scene.step: expected the environment's actor to be alive" in dead.error.message


@pytest.mark.slow
async def test_a_method_that_blocks_its_actor_delays_no_other_actor_and_is_killed(config, tmp_path):
    async with open_actors(scene(), replace(config, stuck_s=2.0)) as actors:
        blocked = asyncio.ensure_future(
            episodes(actors, ["block 600"], marks=str(tmp_path), limits=Limits(max_length=512, step_timeout_s=120))
        )
        await until((tmp_path / "blocked").exists)
        others = await asyncio.wait_for(episodes(actors, ["play"]), 20)  # in the other actor: the least loaded
        assert others[0].error is None
        [stuck] = await asyncio.wait_for(blocked, 60)
        assert stuck.error.kind == "infra"
        assert "an `async def` of Scene blocks it" in stuck.error.message
        await until(lambda: len(actors.pids) == 2)


@pytest.mark.slow
async def test_actors_that_die_again_and_again_are_given_up(config, tmp_path):
    few = replace(config, num=1, max_restarts=1, stuck_s=60.0)
    async with open_actors(scene(), few) as actors:
        for _ in range(2):
            [dead] = await episodes(actors, ["die"], marks=str(make_folder(tmp_path / str(time.monotonic_ns()))))
            assert dead.error.kind == "infra"
        [none] = await asyncio.wait_for(episodes(actors, ["play"]), 20)
        assert none.error.kind == "infra"
        assert "expected a living actor" in none.error.message


@pytest.mark.slow
async def test_anything_that_cannot_be_loaded_ends_the_run_before_it_begins(config):
    with pytest.raises(ConfigError, match=r"on every node"):
        async with open_actors(EnvSpec(env="gone.py:Scene", folder="/nowhere"), config):
            pytest.fail("opened")
    with pytest.raises(ConfigError, match=r"--env_actors, --env_actor_cpus: expected room for 2 times CPU 1000, GPU 0"):
        async with open_actors(scene(), EnvActorConfig(num=2, cpus=1000.0)):
            pytest.fail("opened")


async def until(condition, timeout_s=30):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def make_folder(path):
    path.mkdir()
    return path


# --- the command ----------------------------------------------------------------------------------------------------


AGENT_FUNC = """
import os
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def step(self, states):
        self.turns += 1
        feedback = {"environment_feedback": " and then", "done": self.turns == 2}
        return feedback | {"rewards": 1.0, "scores": 1.0, "extra_logs": {"pid": os.getpid()}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.mark.slow
def test_the_agents_of_an_agent_func_run_in_the_actors_with_the_same_tokens(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent_func.py").write_text(AGENT_FUNC)
    write_rows(tmp_path / "data.jsonl", [{"prompt": f"What is {n} + 1?", "label": str(n + 1)} for n in range(4)])
    for file, out in (("agent_func.py", "mine"), (FILES / "own_loop_queue.py", "own_loop")):
        argv = ["run", "--agent_func_path", file, "--data", "data.jsonl", "--max_tokens", 16, "--max_length", 256]
        argv += ["--temperature", 0, "--json"]
        assert command([*argv, "--out", f"{out}-here"]) == 0
        assert command([*argv, "--out", f"{out}-there", "--env_actors", 1, "--env_actor_cpus", 0.5]) == 0
        here, there = (
            sorted(lines(Path(f"{out}-{where}")), key=lambda e: e["episode_id"]) for where in ("here", "there")
        )
        for ours, theirs in zip(here, there, strict=True):
            assert theirs["error"] is None
            assert theirs["segments"][0]["token_ids"] == ours["segments"][0]["token_ids"]
            assert (theirs["reward"], len(theirs["turns"])) == (ours["reward"], len(ours["turns"]))
    pids = {turn["result"]["info"]["pid"] for e in lines(tmp_path / "mine-there") for turn in e["turns"]}
    assert len(pids) == 1
    assert os.getpid() not in pids


@pytest.mark.slow
def test_a_run_loses_nothing_when_an_environments_actor_is_killed(session, tmp_path):
    argv = ["run", "--env", "math_retry", "--temperature", 0, "--json", "--max_tokens", 60, "--concurrency", 16]
    argv += ["--limit", 100]
    killed = []

    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not killed:
            if len(lines(tmp_path / "there")) >= 10:
                killed.extend(actors_of_this_ray()[:1])
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    assert command([*argv, "--out", tmp_path / "there", "--env_actors", 2, "--env_actor_cpus", 0.5]) == 0
    thread.join()
    assert killed
    assert ids(tmp_path / "there") == [f"{index:06d}/0" for index in range(100)]
    assert all(episode["error"] is None for episode in lines(tmp_path / "there"))
    assert any(episode["attempt"] for episode in lines(tmp_path / "there"))


def actors_of_this_ray():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::EnvActor"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
