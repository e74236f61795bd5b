"""Episodes whose environments are in actors, for the runner."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentenv.agent import AgentInstance, Engine, Tokenizer
from agentenv.chat import Chat
from agentenv.cluster import Need, ray_session, reserve
from agentenv.config import RunConfig
from agentenv.env_actors.actors import EnvActorConfig, EnvActors, RemoteAgent
from agentenv.env_actors.host import EnvSpec
from agentenv.episode import EpisodeKey, run_episode
from agentenv.errors import ConfigError
from agentenv.executor import AgentFunc
from agentenv.loading import EnvSource, EpisodeSource
from agentenv.trajectory import Trajectory
from agentenv.types import Limits, SamplingParams, Task


@dataclass(frozen=True, slots=True)
class RemoteEnv:
    """Episodes of an environment whose instances live in actors."""

    actors: EnvActors
    kwargs: Mapping[str, Any]

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Trajectory:
        """Run one episode; see `run_episode`."""
        make = partial(self._make, self.actors.agent_class())
        return await run_episode(make, task, engine=engine, chat=chat, sampling=sampling, limits=limits, key=key)

    async def _make(self, cls: Any) -> AgentInstance:
        agent: RemoteAgent = cls(**self.kwargs)
        await agent.make()
        return agent


@asynccontextmanager
async def in_actors(source: EpisodeSource, config: RunConfig, tokenizer: Tokenizer) -> AsyncIterator[EpisodeSource]:
    """The same episodes with their environments in `--env_actors` actors; `source` itself where there are none.

    Raises:
        ConfigError: the source has no agent instances, a node cannot load them, or the cluster has no room.
        MissingDependency: Ray is not installed.
    """
    if not config.env_actors:
        yield source
        return
    if not isinstance(source, EnvSource | AgentFunc):
        raise ConfigError(
            f"--env_actors: expected an environment with `step`, got {type(source).__name__}. Leave the flag out."
        )
    spec = EnvSpec(config.env, config.agent_func_path, tokenizer, os.getcwd())
    stuck_s = min(max(1.0, config.step_timeout_s / 2), 30.0)  # innocent neighbours are not to time out first
    actors = EnvActorConfig(config.env_actors, config.env_actor_cpus, stuck_s, cluster=config.cluster)
    async with open_actors(spec, actors) as opened:
        if isinstance(source, AgentFunc):
            yield source.with_agent(opened.agent_class())
        else:
            yield RemoteEnv(opened, source.kwargs)


@asynccontextmanager
async def open_actors(spec: EnvSpec, config: EnvActorConfig) -> AsyncIterator[EnvActors]:
    """Started actors, ended at the end together with the Ray that was started for them."""
    cluster = replace(config.cluster, cpus=max(config.cluster.cpus, config.num * config.cpus))
    with ray_session(cluster):
        async with reserve(Need("--env_actors, --env_actor_cpus", config.num, config.cpus), cluster) as places:
            actors = EnvActors(spec, places, config)
            try:
                await actors.start()
                yield actors
            finally:
                await actors.close()
