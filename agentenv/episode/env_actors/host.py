"""The actor's side: loads the class, and makes, calls and closes agent instances by number."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import traceback
from collections.abc import Awaitable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentenv._util.calls import AgentThreads, call, create
from agentenv._util.paths import place_of, traceback_of
from agentenv._util.ray.cluster import restore_sigchld
from agentenv._util.version import __version__
from agentenv.core.agent import AgentInstance
from agentenv.episode.registry import load_env
from agentenv.errors import AgentEnvError, ConfigError


class Spec(Protocol):
    """The environment that an actor loads; sent to the actor."""

    def load(self) -> type[AgentInstance]:
        """Return the class of the agent instances.

        Raises:
            ConfigError: the class is missing in the actor.
        """


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The environment of a value of `--env`."""

    env: str
    folder: str = ""
    """Folder of relative paths. If a file is missing there on an actor's node, the actor's working folder is used."""

    def load(self) -> type[AgentInstance]:
        """Return the class; see `Spec`."""
        path, colon, attribute = self.env.partition(":")
        name = found_file(path, self.folder) + colon + attribute if path.endswith(".py") else self.env
        cls: type[AgentInstance] = load_env(name)
        return cls

    def check(self, flag: str = "--env_actors") -> None:
        """Raise ConfigError, which names the flag, if only this process has the class."""
        module, _, attribute = self.env.partition(":")
        if module == "__main__" or "<locals>" in attribute:
            raise ConfigError(
                f"{flag}: expected a class that other processes can import, got {self.env}. Save it in a file "
                f"and name that, or pass {flag.lstrip('-')} 0."
            )


def found_file(path: str, folder: str) -> str:
    """Return where a file is: in `folder`, or from the working folder.

    Raises:
        ConfigError: in neither.
    """
    there = Path(folder, Path(path).expanduser())
    if there.is_file() or Path(path).is_file():
        return str(there if there.is_file() else path)
    raise ConfigError(
        f"--env_actors: expected {there} on every node, got none on {socket.gethostname()}. Put it on a shared "
        """disk, or ship this folder: --ray_runtime_env '{"working_dir": "."}' and a path relative to it."""
    )


_FACTS = ("ends_run", "exit_code", "http_status", "retry_step")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of an agent's method, in a form that can be sent to another process."""

    name: str
    base: type[Exception]
    """The nearest class that every process has: a builtin or one of agentenv's."""
    message: str
    place: str
    """file:line in the user's code."""
    traceback: str
    """As in the record: `traceback_of`."""
    trace: str
    """The whole traceback, for logs."""
    facts: Mapping[str, Any]
    """Attributes of an error of agentenv: whether it ends the run or the step runs again, and others."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the Failure for an exception, with its traceback."""
        known = (each for each in type(error).__mro__ if each.__module__ in ("builtins", "agentenv.errors"))
        plain = (each for each in known if issubclass(each, Exception) and not issubclass(each, BaseExceptionGroup))
        base = next(plain, Exception)
        trace = "".join(traceback.format_exception(error))
        place, text = place_of(error), traceback_of(error)
        is_ours = isinstance(error, AgentEnvError)
        facts = {name: getattr(error, name) for name in _FACTS if is_ours and hasattr(error, name)}
        return cls(type(error).__name__, base, str(error) or repr(error), place, text, trace, facts)

    def error(self) -> Exception:
        """Return an exception with the same name, base class, message, place and traceback."""
        known = {"place": self.place, "traceback": self.traceback, **self.facts}
        cls = type(self.name, (self.base,), {"__str__": lambda _: self.message, **known})
        error: Exception = self.base.__new__(cls)
        error.add_note(f"In the environment's actor:\n{self.trace}")
        return error


class EnvActor:
    """Agent instances by number. Methods run on one event loop; synchronous methods of agents run in threads, those of
    a class with `cpu_bound = True` one by one: threads that compete for the interpreter only slow each other down.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._agents: dict[int, AgentInstance] = {}
        self._threads: dict[int, AgentThreads] = {}
        self._turn = asyncio.Semaphore(1)

    async def start(self) -> tuple[int, str, str, tuple[float, float] | None]:
        """Load the class and return the process id, the version of agentenv, the class's name and its score range."""
        restore_sigchld()
        self._cls = self._spec.load()
        return os.getpid(), __version__, self._cls.__name__, self._cls.score_range

    async def make(self, number: int, kwargs: Mapping[str, Any]) -> Failure | None:
        """Make an agent instance."""

        async def make_agent() -> None:
            self._agents[number] = await create(self._cls, kwargs)
            self._threads[number] = AgentThreads()

        failure: Failure | None = await _outcome(make_agent())
        return failure

    async def ask(self, number: int, method: str, states: Any) -> Any:
        """Call a method of an agent and return its result, or the Failure if it raises an exception."""
        function = getattr(self._agents[number], method)
        computes = self._cls.cpu_bound and not inspect.iscoroutinefunction(function)
        async with self._turn if computes else nullcontext():
            with self._threads[number].noted():
                return await _outcome(call(function, states))

    async def drop(self, number: int) -> Failure | None:
        """Close an agent and drop it; do nothing if it was never made."""
        agent = self._agents.pop(number, None)
        if agent is None:
            return None
        failure: Failure | None = await _outcome(self._threads.pop(number).then(partial(call, agent.close)))
        return failure

    async def ping(self) -> int:
        """Return the number of agents; a blocked event loop does not answer."""
        return len(self._agents)


def host_env(spec: Spec, _call_parent: object) -> EnvActor:
    """Make the EnvActor of a local process."""
    return EnvActor(spec)


async def _outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except BaseException as error:  # sent to the episode loop, not handled here
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        outcome = Failure.of(error)
    return outcome
