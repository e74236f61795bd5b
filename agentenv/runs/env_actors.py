"""Episode sources whose environments live in actors, as `agentenv.episode.env_actors` has them: local ones or Ray's."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentenv._util.ray.cluster import (
    ActorDemand,
    ClusterConfig,
    call_result,
    describe_death,
    import_ray,
    kill_actor,
    missing_package_error,
    ray_session,
    reserve,
)
from agentenv.core.agent import AgentInstance
from agentenv.core.engine import Tokenizer
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.episode.env_actors.actors import (
    ActorLost,
    EnvActorConfig,
    EnvActors,
    check_kwargs,
    made_agent,
    no_plain_data,
)
from agentenv.episode.env_actors.host import EnvActor, EnvSpec, Spec, found_file
from agentenv.episode.env_actors.local import num_cores, open_local_actors
from agentenv.episode.loop import Episode
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource, EpisodeSource, as_agent
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.interop.agent_files import load_agent_func
from agentenv.interop.openrlhf.executor import AgentFunc
from agentenv.runs.config import RayOptions, RunConfig

_MAX_CALLS = 10_000
"""Maximum number of concurrent calls of an actor."""


class RayActor:
    """An EnvActor in Ray, which must be running; see `Actor` in `agentenv.episode.env_actors.actors`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    async def start(cls, spec: Spec, options: Mapping[str, Any]) -> RayActor:
        """Start an actor with Ray's options."""
        fixed = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _MAX_CALLS}
        return cls(import_ray().remote(EnvActor).options(**fixed, **options).remote(spec))

    async def call(self, method: str, *args: Any, where: str) -> Any:
        """Call a method of the EnvActor."""
        ray = import_ray()
        try:
            return await call_result(getattr(self._handle, method).remote(*args))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AgentEnvError):
                raise error.cause from None
            raise no_plain_data(where, error.cause) from error
        except ray.exceptions.RaySystemError as error:  # the result cannot be unpickled here
            raise no_plain_data(where, error) from error
        except ray.exceptions.TaskCancelledError as error:
            raise InfraError(f"{where}: expected an answer, got a call that was cancelled. Run it again.") from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            if (absent := missing_package_error("--env_actors", error)) is not None:
                raise absent from error
            raise ActorLost(describe_death(error)) from error
        except TypeError as error:
            raise no_plain_data(where, error) from error

    def send(self, method: str, *args: Any) -> None:
        """Call a method without waiting for its result."""
        getattr(self._handle, method).remote(*args)

    def kill(self) -> None:
        """End the process."""
        kill_actor(self._handle)

    async def close(self) -> None:
        """End the process; the raylet waits for it."""
        self.kill()


@dataclass(frozen=True, slots=True)
class AgentFuncSpec:
    """The agent class of an agent_func file; see `Spec`."""

    path: str
    tokenizer: Tokenizer
    """For the constructor of the file's executor."""
    folder: str = ""
    """As in EnvSpec."""

    def load(self) -> type[AgentInstance]:
        """Return the class; see `Spec`."""
        no_engine: Any = None
        named = load_agent_func(found_file(self.path, self.folder)).agent_class(no_engine, self.tokenizer)
        if named is None:
            raise ConfigError(
                f"--env_actors: expected {self.path} to name its agent class, got none. "
                "Leave --env_actors out: the file runs its own loop."
            )
        return as_agent(named)


@dataclass(frozen=True, slots=True)
class RemoteEnv:
    """Episodes of an environment whose instances live in actors."""

    actors: EnvActors
    kwargs: Mapping[str, Any]

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `Episode.run`."""
        return await Episode(task, setup, key).run(partial(made_agent, self.actors, self.kwargs))


@asynccontextmanager
async def in_actors(
    source: EpisodeSource, config: RunConfig, tokenizer: Tokenizer, *, cluster: ClusterConfig | None = None
) -> AsyncIterator[EpisodeSource]:
    """Yield the source with its environments in actors, or `source` itself if `--env_actors` and its class need none.

    `cluster` is that of the whole job, if `config` is of one of its environments.

    Raises:
        ConfigError: the source has no agent instances, an actor cannot load them, or the cluster has no room.
        MissingDependency: Ray is not installed.
    """
    num = config.ray.env_actors
    if num is None and is_cpu_bound(source):
        num = min(num_cores(), config.concurrency)
    if not num:
        yield source
        return
    if not isinstance(source, EnvSource | AgentFunc):
        raise ConfigError(
            f"--env_actors: expected an environment with `step`, got {type(source).__name__}. Leave the flag out."
        )
    spec: Spec
    if config.agent_func_path is not None:
        spec = AgentFuncSpec(config.agent_func_path, tokenizer, os.getcwd())
    else:
        spec = EnvSpec(config.env[0], os.getcwd())
        spec.check()
    if isinstance(source, EnvSource):
        check_kwargs(source.kwargs)
    ray, limits = config.ray, EnvActorConfig.of(config.limits.step_timeout_s)
    opening: AbstractAsyncContextManager[EnvActors]
    library = sys.modules.get("ray")
    is_connected = library is not None and library.is_initialized()
    if ray.env_actors and (config.engine == "ray" or ray.ray_address or is_connected):
        demand = ActorDemand("--env_actors, --env_actor_cpus", num, ray.env_actor_cpus)
        opening = open_ray_actors(spec, demand, cluster or config.cluster, limits)
    elif ray.env_actor_cpus == RayOptions.env_actor_cpus:
        opening = open_local_actors(spec, num, limits)
    else:
        raise ConfigError(
            f"--env_actor_cpus: expected Ray actors, got {ray.env_actor_cpus:g} for local processes. Leave it out, or "
            "add --ray_address."
        )
    async with opening as actors:
        if isinstance(source, AgentFunc):
            yield source.with_agent(actors.agent_class())
        else:
            yield RemoteEnv(actors, source.kwargs)


def is_cpu_bound(source: EpisodeSource) -> bool:
    """Return True if the class of the source's agent instances says that it computes."""
    cls = source.cls if isinstance(source, EnvSource) else getattr(source, "executor_cls", None)
    return bool(getattr(getattr(cls, "agent_cls", cls), "cpu_bound", False))


@asynccontextmanager
async def open_ray_actors(
    spec: Spec, demand: ActorDemand, cluster: ClusterConfig, config: EnvActorConfig
) -> AsyncIterator[EnvActors]:
    """Start actors in Ray, yield them, and end them and any Ray that was started for them."""
    cluster = replace(cluster, cpus=max(cluster.cpus, demand.num * demand.cpus))
    with ray_session(cluster):
        async with reserve(demand, cluster) as found:
            actors = EnvActors([partial(RayActor.start, spec, options) for options in found], config)
            try:
                await actors.start()
                yield actors
            finally:
                await actors.close()
