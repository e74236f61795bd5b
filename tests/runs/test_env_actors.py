"""Environments in actors, local or Ray's: the same episodes, whatever an actor does to its neighbors."""

import asyncio
import ctypes
import os
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from agentenv._util.ray.cluster import ActorDemand, ClusterConfig, ray_session
from agentenv.chat.chat import Chat
from agentenv.core.types import Limits, SamplingParams, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.env_actors.actors import EnvActorConfig
from agentenv.episode.env_actors.host import EnvSpec
from agentenv.episode.env_actors.local import num_cores, open_local_actors
from agentenv.episode.registry import load_env
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError
from agentenv.runs.config import RunConfig
from agentenv.runs.env_actors import AgentFuncSpec, RemoteEnv, in_actors, open_ray_actors
from agentenv.testing.tokenizers import CharTokenizer
from tests.drivers import command, lines, write_rows
from tests.waits import until

TESTS = Path(__file__).parents[1]
SCENE = TESTS / "episode" / "env_actors" / "scene.py"
FILES = TESTS / "interop" / "agent_funcs"
FLAGS = "--env_actors, --env_actor_cpus"
ONCE = ErrorPolicy(max_retries=0)
LIMITS = Limits(max_length=512, max_turns=4, step_timeout_s=30)


# --- without Ray ----------------------------------------------------------------------------------------------------


async def opened(source, **flags):
    async with in_actors(source, RunConfig.from_flags(**{"env": "math_retry"} | flags), CharTokenizer()) as made:
        return made


async def test_a_source_without_actors_is_itself():
    source = EnvSource(load_env(f"{SCENE}:Scene"))
    assert await opened(source) is source


async def test_cores_of_actors_are_refused_without_ray():
    with pytest.raises(ConfigError, match="--env_actor_cpus: expected Ray actors, got 2 for local processes"):
        await opened(EnvSource(load_env("math_retry")), env_actors=1, env_actor_cpus=2.0)


@pytest.mark.parametrize("kwargs", [{"marks": threading.Lock()}, {"marks": lambda: 1}], ids=["lock", "function"])
async def test_arguments_that_cannot_be_sent_to_a_process_are_refused(kwargs):
    with pytest.raises(ConfigError, match="--env_kwargs: marks: expected a value that can be pickled"):
        await opened(EnvSource(load_env(f"{SCENE}:Scene"), kwargs), env=f"{SCENE}:Scene", env_actors=1)


async def test_an_agent_with_its_own_loop_is_refused():
    with pytest.raises(ConfigError, match="--env_actors: expected an environment with `step`"):
        await opened(object(), env_actors=1)


@pytest.mark.parametrize("file", ["template.py", "screens.py", "own_loop_queue.py"])
def test_the_class_of_an_agent_func_is_found_without_an_engine(file):
    spec = AgentFuncSpec(str(FILES / file), CharTokenizer())
    assert hasattr(spec.load(), "step")


def test_a_file_that_names_no_agent_class_is_refused():
    with pytest.raises(ConfigError, match="Leave --env_actors out: the file runs its own loop"):
        AgentFuncSpec(str(FILES / "own_loop.py"), CharTokenizer()).load()


# --- in local processes and in Ray ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session():
    """One Ray for the tests below, which use it as any running one."""
    pytest.importorskip("ray")
    with ray_session(ClusterConfig(cpus=2)):
        yield


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.long), pytest.param("ray", marks=pytest.mark.slow)])
def open_actors(request):
    """A function that opens two actors, or `num`, of a class of the scene."""
    if request.param == "ray":
        request.getfixturevalue("session")

    def opened(name="Scene", *, num=2, **limits):
        spec, config = scene(name), EnvActorConfig(**{"restart_wait_s": 0.01} | limits)
        if request.param == "local":
            return open_local_actors(spec, num, config)
        return open_ray_actors(spec, ActorDemand(FLAGS, num, 0.5), ClusterConfig(), config)

    return opened


async def episodes(actors, labels, *, limits=LIMITS, policy=ONCE, **kwargs):
    """The records of one episode for each label, in actors."""
    return await of_source(RemoteEnv(actors, kwargs), labels, limits=limits, policy=policy)


async def of_source(source, labels, *, limits=LIMITS, policy=ONCE):
    tasks = [Task("go", label, task_id=str(index)) for index, label in enumerate(labels)]
    engine, sampling = ScriptedEngine(["yes"], CharTokenizer()), SamplingParams(max_tokens=8, seed=0)
    runner = EpisodeRunner(source, EpisodeSetup(engine, Chat(CharTokenizer()), sampling, limits), policy=policy)
    ended = {}
    await runner.run(plan(tasks, 1), lambda trajectory: ended.update({trajectory.group_id: trajectory}))
    return [ended[task.task_id] for task in tasks]


def scene(name="Scene"):
    return EnvSpec(name if ":" in name else f"{SCENE}:{name}")


async def test_episodes_are_spread_over_the_actors_and_end_as_in_this_process(open_actors, tmp_path):
    async with open_actors() as actors:
        ended = await episodes(actors, ["play"] * 8, marks=str(tmp_path))
        assert len(actors.pids) == 2
        assert [each.reward for each in ended] == [2.0] * 8
        pids = Counter(int(each.turns[-1].result.info["pid"]) for each in ended)
        assert pids == dict.fromkeys(actors.pids, 4)
        assert len(list(tmp_path.glob("closed-*"))) == 8
        assert [host.life.num_agents for host in actors._hosts] == [0, 0]
        [cut] = await episodes(actors, ["play"], limits=Limits(max_length=512, max_turns=1))
        assert (cut.stop_reason, cut.reward, cut.score) == (StopReason.MAX_TURNS, 1.5, 0.25)


async def test_an_exception_of_an_environment_is_recorded_as_in_this_process(open_actors):
    labels = ["own_error", "infra", "cancelled"]
    here = await of_source(EnvSource(load_env(f"{SCENE}:Scene")), labels)
    async with open_actors() as actors:
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


async def test_exit_codes_of_subprocesses_are_what_they_are_here_and_in_the_actors(open_actors):
    assert subprocess.run("false", check=False).returncode == 1
    adopts = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)
    assert adopts.value == 0, "this process would collect the zombies of actors"
    async with open_actors() as actors:
        [ended] = await episodes(actors, ["run false"])
        assert ended.turns[-1].result.info == {"code": 1.0}


async def test_a_deadline_cancels_the_call_in_the_actor(open_actors, tmp_path):
    async with open_actors() as actors:
        soon = Limits(max_length=512, max_turns=4, step_timeout_s=2)
        [late] = await episodes(actors, ["wait"], limits=soon, marks=str(tmp_path))
        assert late.stop_reason == StopReason.STEP_TIMEOUT
        assert "Scene.step: expected an answer within 2 s" in late.error.message
        await until((tmp_path / "cancelled").exists)
        assert len(list(tmp_path.glob("closed-*"))) == 1
        assert actors.num_restarts == 0


MEETING = """
import threading
from agentenv import AgentInstance, StepResult

together = threading.Barrier(4)


class Meets(AgentInstance):
    def step(self, states):
        together.wait(60)
        return StepResult(terminated=True)
"""


async def test_plain_methods_that_wait_run_side_by_side(open_actors, tmp_path):
    (tmp_path / "meeting.py").write_text(MEETING)
    async with open_actors(f"{tmp_path}/meeting.py:Meets", num=1) as actors:
        ended = await episodes(actors, ["meet"] * 4, limits=Limits(max_length=512, max_turns=4, step_timeout_s=120))
        assert [each.error for each in ended] == [None] * 4


async def test_an_actor_that_is_killed_is_replaced_and_its_episodes_are_run_again(open_actors, tmp_path):
    async with open_actors() as actors:
        before = actors.pids
        labels, twice = ["die", *["play"] * 9], ErrorPolicy(max_retries=2, retry_wait_s=0.05)
        ended = await episodes(actors, labels, policy=twice, marks=str(tmp_path))
        assert [each.error for each in ended] == [None] * 10
        assert [each.reward for each in ended] == [2.0] * 10
        assert ended[0].attempt == 1
        await until(lambda: len(actors.pids) == 2)
        assert actors.num_restarts == 1
        assert len(set(before) & set(actors.pids)) == 1
        [dead] = await episodes(actors, ["die"], marks=str(make_folder(tmp_path / "again")))
        assert dead.error.kind == "infra"
        assert "Scene.step: expected a living process of --env_actors" in dead.error.message


async def test_a_method_that_blocks_its_actor_delays_no_other_actor_and_is_killed(open_actors, tmp_path):
    async with open_actors(stuck_s=2.0) as actors:
        long = Limits(max_length=512, step_timeout_s=120)
        blocked = asyncio.ensure_future(episodes(actors, ["block 600"], marks=str(tmp_path), limits=long))
        await until((tmp_path / "blocked").exists)
        others = await asyncio.wait_for(episodes(actors, ["play"]), 60)  # in the other actor: the least loaded
        assert others[0].error is None
        [stuck] = await asyncio.wait_for(blocked, 120)
        assert stuck.error.kind == "infra"
        assert "an `async def` of Scene blocks it" in stuck.error.message
        await until(lambda: len(actors.pids) == 2)


async def test_actors_that_die_again_and_again_are_given_up(open_actors, tmp_path):
    async with open_actors(num=1, max_restarts=1, stuck_s=60.0) as actors:
        for _ in range(2):
            [dead] = await episodes(actors, ["die"], marks=str(make_folder(tmp_path / str(time.monotonic_ns()))))
            assert dead.error.kind == "infra"
        [none] = await asyncio.wait_for(episodes(actors, ["play"]), 60)
        assert none.error.kind == "infra"
        assert "expected a living actor" in none.error.message


async def test_a_class_that_cannot_be_loaded_ends_the_run_before_it_begins(open_actors):
    with pytest.raises(ConfigError, match="to name a class, got no 'Gone' there"):
        async with open_actors("Gone"):
            pytest.fail("opened")


@pytest.mark.slow
async def test_a_file_or_room_that_is_missing_in_ray_ends_the_run_before_it_begins(session):
    spec = EnvSpec("gone.py:Scene", "/nowhere")
    with pytest.raises(ConfigError, match=r"on every node"):
        async with open_ray_actors(spec, ActorDemand(FLAGS, 1, 0.5), ClusterConfig(), EnvActorConfig()):
            pytest.fail("opened")
    with pytest.raises(ConfigError, match=r"--env_actors, --env_actor_cpus: expected room for 2 times CPU 1000, GPU 0"):
        async with open_ray_actors(scene(), ActorDemand(FLAGS, 2, 1000.0), ClusterConfig(), EnvActorConfig()):
            pytest.fail("opened")


def make_folder(path):
    path.mkdir()
    return path


# --- the command ----------------------------------------------------------------------------------------------------


COMPUTING_FUNC = """
import os
from agentenv import StepResult
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Counts(AgentInstanceBase):
    cpu_bound = True

    def reset(self, states):
        return {"observation": states["observation"] + "!"}

    def step(self, states):
        return StepResult(reward=1.0, terminated=True, info={"pid": float(os.getpid())})

class AgentExecutor(MultiTurnAgentExecutor):
    agent_cls = Counts
"""
COMPUTES = ["--env", f"{SCENE}:Computes"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "num"),
    [
        (COMPUTES, num_cores()),
        ([*COMPUTES, "--env_actors", 0], 0),
        (["--env", f"{SCENE}:Scene", "--env_actors", 1], 1),
        (["--agent_func_path", "agent_func.py"], num_cores()),
    ],
    ids=["one per core", "none", "as many as asked for", "of an agent_func"],
)
def test_a_class_that_computes_runs_in_local_processes(flags, num, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent_func.py").write_text(COMPUTING_FUNC)
    write_rows(tmp_path / "data.jsonl", [{"prompt": str(n), "label": "play"} for n in range(16)])
    argv = ["run", *flags, "--data", "data.jsonl", "--max_tokens", 8, "--max_length", 256]
    assert command([*argv, "--engine", "scripted", "--json", "--out", "out"]) == 0
    pids = {turn["result"]["info"]["pid"] for each in lines(tmp_path / "out") for turn in each["turns"]}
    assert len(pids) == max(num, 1)
    assert (os.getpid() in pids) == (num == 0)
