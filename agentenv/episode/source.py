"""Sources of episodes: what the runner calls for each one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentenv._util.calls import create
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, Task
from agentenv.episode.factory import check_arguments
from agentenv.episode.loop import Episode
from agentenv.episode.setup import EpisodeKey, EpisodeSetup


class EpisodeSource(Protocol):
    """Runs single episodes: of an environment, of an agent with its own loop, or of an agent_func file."""

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode and return its record."""


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
