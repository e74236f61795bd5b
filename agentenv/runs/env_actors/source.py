"""Episode sources for the runner whose environments live in actors."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentenv._util.ray.cluster import ActorDemand, ClusterConfig, ray_session, reserve
from agentenv.core.agent import AgentInstance
from agentenv.core.engine import Tokenizer
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.episode.loop import Episode
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource, EpisodeSource
from agentenv.errors import ConfigError
from agentenv.interop.openrlhf.executor import AgentFunc
from agentenv.runs.config import RunConfig
from agentenv.runs.env_actors.actors import EnvActorConfig, EnvActors, RemoteAgent
from agentenv.runs.env_actors.host import EnvSpec


@dataclass(frozen=True, slots=True)
class RemoteEnv:
    """Episodes of an environment whose instances live in actors."""

    actors: EnvActors
    kwargs: Mapping[str, Any]

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `Episode.run`."""
        make = partial(self._make, self.actors.agent_class())
        return await Episode(task, setup, key).run(make)

    async def _make(self, cls: Any) -> AgentInstance:
        agent: RemoteAgent = cls(**self.kwargs)
        await agent.make()
        return agent


@asynccontextmanager
async def in_actors(
    source: EpisodeSource, config: RunConfig, tokenizer: Tokenizer, *, cluster: ClusterConfig | None = None
) -> AsyncIterator[EpisodeSource]:
    """Yield the source with its environments in `--env_actors` actors, or `source` itself without the flag.

    `cluster` is that of the whole job, if `config` is of one of its environments.

    Raises:
        ConfigError: the source has no agent instances, a node cannot load them, or the cluster has no room.
        MissingDependency: Ray is not installed.
    """
    if not config.ray.env_actors:
        yield source
        return
    if not isinstance(source, EnvSource | AgentFunc):
        raise ConfigError(
            f"--env_actors: expected an environment with `step`, got {type(source).__name__}. Leave the flag out."
        )
    spec = EnvSpec(next(iter(config.env), None), config.agent_func_path, tokenizer, os.getcwd())
    stuck_s = min(
        max(1.0, config.limits.step_timeout_s / 2), 30.0
    )  # below the time limit of other agents on the same actor
    actors = EnvActorConfig(
        config.ray.env_actors, config.ray.env_actor_cpus, stuck_s, cluster=cluster or config.cluster
    )
    async with open_actors(spec, actors) as opened:
        if isinstance(source, AgentFunc):
            yield source.with_agent(opened.agent_class())
        else:
            yield RemoteEnv(opened, source.kwargs)


@asynccontextmanager
async def open_actors(spec: EnvSpec, config: EnvActorConfig) -> AsyncIterator[EnvActors]:
    """Start actors, yield them, and end them and any Ray that was started for them."""
    cluster = replace(config.cluster, cpus=max(config.cluster.cpus, config.num * config.cpus))
    with ray_session(cluster):
        async with reserve(ActorDemand("--env_actors, --env_actor_cpus", config.num, config.cpus), cluster) as places:
            actors = EnvActors(spec, places, config)
            try:
                await actors.start()
                yield actors
            finally:
                await actors.close()
