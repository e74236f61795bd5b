"""Sources of episodes: what the runner calls for each one, and agent classes as they take them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Protocol

from agentenv._util.calls import create
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, Task
from agentenv.episode.loop import Episode
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError


class EpisodeSource(Protocol):
    """Runs single episodes: of an environment, of an agent with its own loop, or of an agent_func file."""

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode and return its record."""


def needs_label(source: EpisodeSource) -> bool:
    """Return whether a row without a label is an error: the environment's `needs_label`, True for other sources."""
    return bool(getattr(getattr(source, "cls", None), "needs_label", True))


@dataclass(frozen=True, slots=True)
class EnvSource:
    """Episodes of an environment class with fixed constructor arguments."""

    cls: type[AgentInstance]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError if the constructor does not take the arguments."""
        check_arguments(self.cls, self.kwargs)

    @property
    def datasets(self) -> Mapping[str, str | Path]:
        """Data that ships with the environment, by name."""
        return self.cls.datasets

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `Episode.run`."""
        return await Episode(task, setup, key).run(partial(create, self.cls, self.kwargs))


@dataclass(frozen=True, slots=True)
class Member:
    """One environment of a mixture."""

    source: EpisodeSource
    limits: Limits


@dataclass(frozen=True, slots=True)
class Mixture:
    """Episodes of several environments: the task names its own, which has its own limits."""

    members: Mapping[str, Member]
    """By name, as in `Task.env`."""

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode of the task's environment."""
        member = self.members[task.env]
        return await member.source.run(task, replace(setup, limits=member.limits), key)


def as_agent(cls: Any) -> type[AgentInstance]:
    """Return a foreign agent class with our defaults for the methods it lacks, and a subclass of ours as it is.

    Raises:
        ConfigError: its `score_range` is neither None nor an interval.
    """
    agent = cls if issubclass(cls, AgentInstance) else _completed(cls)
    match agent.score_range:
        case None:
            return agent
        case (int() | float() as low, int() | float() as high) if -inf < low < high < inf:
            return agent
    raise ConfigError(
        f"{cls.__name__}.score_range: expected (low, high) with low < high, both finite, or None, "
        f"got {agent.score_range!r}. Change the attribute."
    )


@functools.cache
def _completed(cls: Any) -> type[AgentInstance]:
    return type(cls.__name__, (cls, AgentInstance), {"score_range": getattr(cls, "score_range", None)})


def check_arguments(cls: type[Any], kwargs: Mapping[str, Any], where: str = "env_kwargs") -> None:
    """Raise if the constructor of `cls` does not take these arguments, before the first episode.

    `where` names their source; `env_kwargs` is a flag, a key of trainers' files and an argument in Python.

    Raises:
        ConfigError: with the arguments that it takes.
    """
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        names = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
        raise ConfigError(
            f"{where}: expected arguments of {cls.__name__} {names}, got "
            f"{dict(kwargs) if isinstance(kwargs, Mapping) else kwargs!r}: {error}."
        ) from error
