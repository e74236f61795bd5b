"""The actor's side: it loads the class, and makes, asks and closes agent instances by number."""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv import __version__
from agentenv.agent import AgentInstance, Tokenizer, as_agent, call, create
from agentenv.cluster import hear_of_children
from agentenv.episode import place_of
from agentenv.errors import ConfigError
from agentenv.loading import load_agent_func, load_env


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What an actor loads; travels to it."""

    env: str | None = None
    """As `--env`."""
    agent_func_path: str | None = None
    tokenizer: Tokenizer | None = None
    """For the constructor of an agent_func's executor."""
    folder: str = ""
    """That the paths count from; where an actor's node has no such file, its own working folder is it."""

    def load(self) -> type[AgentInstance]:
        """The class of the agent instances.

        Raises:
            ConfigError: it is not there, on this node.
        """
        if self.env is not None:
            path, colon, attribute = self.env.partition(":")
            cls: type[AgentInstance] = load_env(
                self._found(path) + colon + attribute if path.endswith(".py") else self.env
            )
            return cls
        no_engine: Any = None
        named = load_agent_func(self._found(self.agent_func_path or "")).agent_class(no_engine, self.tokenizer)  # type: ignore[arg-type]
        if named is None:
            raise ConfigError(
                f"--env_actors: expected {self.agent_func_path} to name its agent class, got none. "
                "Leave --env_actors out: the file runs its own loop."
            )
        return as_agent(named)

    def _found(self, path: str) -> str:
        there = Path(self.folder, Path(path).expanduser())
        if there.is_file() or Path(path).is_file():
            return str(there if there.is_file() else path)
        raise ConfigError(
            f"--env_actors: expected {there} on every node, got none on {socket.gethostname()}. Put it on a shared "
            """disk, or take this folder there: --ray_runtime_env '{"working_dir": "."}' and a path relative to it."""
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """What a method of an agent raised, in a form that crosses."""

    name: str
    base: type[Exception]
    """The nearest class that every process has: a builtin or one of agentenv's."""
    message: str
    place: str
    """file:line in the user's code."""
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An exception with its traceback."""
        known = (each for each in type(error).__mro__ if each.__module__ in ("builtins", "agentenv.errors"))
        plain = (each for each in known if issubclass(each, Exception) and not issubclass(each, BaseExceptionGroup))
        base = next(plain, Exception)
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, base, str(error) or repr(error), place_of(error), trace)

    def error(self) -> Exception:
        """An exception of that name, kind, message and place."""
        made = type(self.name, (self.base,), {"__str__": lambda _: self.message, "place": self.place})
        error: Exception = self.base.__new__(made)
        error.add_note(f"In the environment's actor:\n{self.trace}")
        return error


class EnvActor:
    """Agent instances by number. Its methods run on one event loop, plain ones of agents in threads."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._agents: dict[int, AgentInstance] = {}

    async def start(self) -> tuple[int, str, str]:
        """Load the class; process id, the version of agentenv, and the name of the class."""
        hear_of_children()
        self._cls = self._spec.load()
        return os.getpid(), __version__, self._cls.__name__

    async def make(self, number: int, kwargs: Mapping[str, Any]) -> Failure | None:
        """Make an agent instance."""

        async def made() -> None:
            """Keep it at once."""
            self._agents[number] = await create(self._cls, kwargs)

        failure: Failure | None = await _outcome(made())
        return failure

    async def ask(self, number: int, method: str, states: Any) -> Any:
        """What a method of an agent returns, or the Failure of what it raised."""
        return await _outcome(call(getattr(self._agents[number], method), states))

    async def drop(self, number: int) -> Failure | None:
        """Close an agent and forget it; one that is not there was never made."""
        agent = self._agents.pop(number, None)
        failure: Failure | None = None if agent is None else await _outcome(call(agent.close))
        return failure

    async def ping(self) -> int:
        """Agents here; answered by an event loop that is not held up."""
        return len(self._agents)


async def _outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except BaseException as error:  # carried to the loop, not handled here
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        outcome = Failure.of(error)
    return outcome
