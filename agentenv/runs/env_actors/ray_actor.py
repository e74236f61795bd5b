"""An environment's actor in Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv._util.ray.cluster import call_result, describe_death, import_ray, kill_actor, missing_package_error
from agentenv.episode.env_actors.actors import ActorLost, no_plain_data
from agentenv.episode.env_actors.host import EnvActor, Spec
from agentenv.errors import AgentEnvError, InfraError

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
