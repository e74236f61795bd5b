"""The actor's side of environments in actors: agents by number, exceptions that cross, files that are found."""

import asyncio
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest

from agentenv._util.paths import traceback_of
from agentenv.core.agent import AgentInstance
from agentenv.episode.env_actors.host import EnvActor, EnvSpec, Failure
from agentenv.episode.registry import load_file
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.rewards.judges.protocol import JudgeMisaddressed
from agentenv.rewards.types import RewardResult

SCENE = Path(__file__).parent / "scene.py"


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


def test_an_error_that_ends_the_run_still_does_when_it_crossed():
    made = Failure.of(JudgeMisaddressed("no key")).error()
    assert isinstance(made, AgentEnvError)
    assert (made.ends_run, made.exit_code, made.http_status) == (True, 2, None)
    stopped = RewardResult.failed("no key", cause=JudgeMisaddressed("no key")).error("step")
    assert Failure.of(stopped).error().exit_code == 2
    assert Failure.of(InfraError("down", retry_step=True)).error().retry_step


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


async def test_an_actor_closes_an_agent_after_its_threads(monkeypatch):
    monkeypatch.setattr("agentenv._util.calls._THREADS_END_S", 60.0)
    monkeypatch.setattr("agentenv._util.calls._CANCEL_GRACE_S", 0.01)
    entered, released, events = threading.Event(), threading.Event(), []

    class Plain(AgentInstance):
        def step(self, states):
            entered.set()
            released.wait(60)
            events.append("step ended")

        def close(self):
            events.append("closed")

    actor = EnvActor(SimpleNamespace(load=lambda: Plain))
    await actor.start()
    await actor.make(1, {})
    asking = asyncio.create_task(actor.ask(1, "step", {}))
    assert await asyncio.to_thread(entered.wait, 60)
    asking.cancel()
    await asyncio.wait({asking})
    dropping = asyncio.create_task(actor.drop(1))
    await asyncio.wait({dropping}, timeout=0.2)
    assert events == []
    released.set()
    assert await dropping is None
    assert events == ["step ended", "closed"]


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


@pytest.mark.parametrize("name", ["__main__:Mine", "mine:make.<locals>.Mine"])
def test_a_class_that_only_this_process_has_is_refused(name):
    with pytest.raises(ConfigError, match=rf"expected a class that other processes can import, got {name}"):
        EnvSpec(name).check()
