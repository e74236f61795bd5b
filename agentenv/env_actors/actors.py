"""The driver's side: the actors, which of them hosts an agent, and what happens when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentenv.agent import AgentInstance
from agentenv.cluster import ClusterConfig, answer_of, check_node, death_said, without_package
from agentenv.env_actors.host import EnvActor, EnvSpec, Failure
from agentenv.errors import AgentEnvError, ContractError, InfraError
from agentenv.ray_import import import_ray

logger = logging.getLogger(__name__)

_MAX_CALLS = 10_000
"""Calls that an actor takes at once."""


@dataclass(frozen=True, slots=True)
class EnvActorConfig:
    """How many actors, and when one is given up."""

    num: int = 1
    cpus: float = 1.0
    """CPU cores of each."""
    stuck_s: float = 30.0
    """An actor whose event loop answers nobody for so long is killed."""
    start_timeout_s: float = 120.0
    restart_wait_s: float = 1.0
    """Wait before an actor is replaced; doubled, up to 30 s, while no episode has ended in its place."""
    max_restarts: int = 8
    """Of a place, without an episode that ended there."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass(slots=True, eq=False)
class _Life:
    """One actor from its start to its death."""

    actor: Any
    pid: int
    num_agents: int = 0
    num_served: int = 0
    lost: str | None = None
    """Why it is gone."""


@dataclass(slots=True, eq=False)
class _Host:
    """The place of an actor, which outlives it."""

    options: Mapping[str, Any]
    life: _Life | None = None
    num_deaths: int = 0
    """Since an episode ended here."""


class EnvActors:
    """Actors that host the agent instances of many episodes; the least loaded gets the next. Ray must be running.

    Args:
        spec: what they load.
        places: Ray's options for each actor.
        config: its numbers.
    """

    def __init__(self, spec: EnvSpec, places: Sequence[Mapping[str, Any]], config: EnvActorConfig) -> None:
        self._spec, self.config = spec, config
        self._hosts = [_Host(options) for options in places]
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.num_restarts = 0
        self.name = "AgentInstance"
        """Of the agents' class."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the living actors, on their machines."""
        return [host.life.pid for host in self._hosts if host.life is not None]

    async def start(self) -> None:
        """Start all actors.

        Raises:
            ConfigError: the class cannot be loaded on a node.
            InfraError: an actor did not start.
        """
        try:
            async with asyncio.TaskGroup() as starts:
                for host in self._hosts:
                    starts.create_task(self._start(host))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def close(self) -> None:
        """End the actors, whatever they do."""
        for task in self._tasks:
            task.cancel()
        for host in self._hosts:
            life, host.life = host.life, None
            if life is not None:
                life.lost = "it was closed."
                _kill(life.actor)

    def agent_class(self) -> type[AgentInstance]:
        """A class whose instances live in the actors; its name is that of the agents' class."""
        forwarded = {method: _forward(self.name, method) for method in ("reset", "step", "on_truncate")}
        return type(self.name, (RemoteAgent,), {"actors": self, **forwarded})

    def number(self) -> int:
        """For the next agent; never given twice."""
        return next(self._numbers)

    async def place(self) -> _Life:
        """Room for one agent, in the least loaded actor.

        Raises:
            InfraError: no actor is alive for `stuck_s`, or none will be.
        """
        deadline = time.monotonic() + self.config.stuck_s
        while not (lives := [host.life for host in self._hosts if host.life is not None]):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or all(host.num_deaths > self.config.max_restarts for host in self._hosts):
                raise InfraError(
                    f"--env_actors: expected a living actor within {self.config.stuck_s:g} s, got none of "
                    f"{len(self._hosts)}. Find out why {self.name} ends its process."
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s), self._changed:
                    await self._changed.wait()
        life = min(lives, key=lambda life: (life.num_agents, life.num_served))
        life.num_agents += 1
        life.num_served += 1
        return life

    def leave(self, life: _Life, *, ended: bool) -> None:
        """Give the room of an agent back; `ended`: its episode came to an end there."""
        life.num_agents -= 1
        for host in self._hosts:
            if ended and host.life is life:
                host.num_deaths = 0

    def abandon(self, life: _Life, number: int) -> None:
        """Close an agent that nobody waits for."""
        if life.lost is None:
            self.leave(life, ended=False)
            life.actor.drop.remote(number)

    async def ask(self, life: _Life, method: str, *args: Any, where: str) -> Any:
        """A method of an actor; what an agent raised is raised again. `where` names it in messages.

        Raises:
            InfraError: the actor is gone.
        """
        ray = import_ray()
        if life.lost is not None:
            raise _hosted_by_dead(where, life.lost)
        try:
            outcome = await answer_of(getattr(life.actor, method).remote(*args))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AgentEnvError):
                raise error.cause from None
            raise _no_plain_data(where, error.cause) from error
        except ray.exceptions.RaySystemError as error:  # what came cannot be read here
            raise _no_plain_data(where, error) from error
        except ray.exceptions.TaskCancelledError as error:
            raise InfraError(f"{where}: expected an answer, got a call that was cancelled. Run it again.") from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            if (absent := without_package("--env_actors", error)) is not None:
                raise absent from error
            self._lose(life, death_said(error))
            raise _hosted_by_dead(where, life.lost or "") from error
        except TypeError as error:
            raise _no_plain_data(where, error) from error
        if isinstance(outcome, Failure):
            raise outcome.error()
        return outcome

    # --- life and death ---------------------------------------------------------------------------------------------

    async def _start(self, host: _Host) -> None:
        cls = import_ray().remote(EnvActor)
        options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _MAX_CALLS, **host.options}
        life = _Life(cls.options(**options).remote(self._spec), pid=0)
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                life.pid, version, self.name = await self.ask(life, "start", where="--env_actors")
            check_node("--env_actors", version)
        except TimeoutError as error:
            _kill(life.actor)
            raise InfraError(
                f"--env_actors: expected an actor to load its environment within {self.config.start_timeout_s:g} s, "
                "got none. Make its import quicker."
            ) from error
        except BaseException:
            _kill(life.actor)
            raise
        host.life = life
        self._spawn(self._watch(life))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, life: _Life) -> None:
        """Ask an actor now and then for an answer; one that leaves two questions unanswered is lost."""
        num_missed, limit_s = 0, self.config.stuck_s / 2
        while life.lost is None and num_missed < 2:
            await asyncio.sleep(limit_s / 4)
            try:
                async with asyncio.timeout(limit_s):
                    await self.ask(life, "ping", where="ping")
                num_missed = 0
            except TimeoutError:
                num_missed += 1
            except InfraError:
                return  # its death is known by now
        held = f"its event loop answered nobody for {self.config.stuck_s:g} s: an `async def` of {self.name} blocks it."
        self._lose(life, held)

    def _lose(self, life: _Life, reason: str) -> None:
        """Take an actor out, and have it replaced."""
        if life.lost is not None:
            return  # others noticed before
        life.lost = reason
        _kill(life.actor)
        for host in self._hosts:
            if host.life is life:
                logger.warning("an environments' actor (process %d) is lost: %s", life.pid, reason)
                host.life = None
                self._spawn(self._replace(host))

    async def _replace(self, host: _Host) -> None:
        while host.life is None:
            host.num_deaths += 1
            if host.num_deaths > self.config.max_restarts:
                break
            self.num_restarts += 1
            await asyncio.sleep(min(30.0, self.config.restart_wait_s * 2 ** (host.num_deaths - 1)))
            try:
                await self._start(host)
            except AgentEnvError as error:
                logger.warning("an environments' actor did not start again: %s", error)
        async with self._changed:
            self._changed.notify_all()


class RemoteAgent(AgentInstance):
    """An agent instance in an actor; made there by `make`, or when it is first asked."""

    actors: ClassVar[EnvActors]

    def __init__(self, **kwargs: Any) -> None:
        self._kwargs = kwargs
        self._number = self.actors.number()
        self._life: _Life | None = None

    async def make(self) -> None:
        """Make it now."""
        life = await self.actors.place()
        try:
            await self.actors.ask(life, "make", self._number, self._kwargs, where=f"{type(self).__name__}()")
        except BaseException:
            self.actors.abandon(life, self._number)
            raise
        self._life = life

    async def _ask(self, method: str, states: Any) -> Any:
        if self._life is None:
            await self.make()
        return await self.actors.ask(
            self._life, "ask", self._number, method, states, where=f"{type(self).__name__}.{method}"  # type: ignore[arg-type]
        )  # fmt: skip

    async def close(self) -> None:
        """Close it there; with its actor it is gone already."""
        life, self._life = self._life, None
        if life is None:
            return
        self.actors.leave(life, ended=life.lost is None)
        if life.lost is None:
            await self.actors.ask(life, "drop", self._number, where=f"{type(self).__name__}.close")

    def __del__(self) -> None:
        life = getattr(self, "_life", None)
        if life is not None:  # OpenRLHF's own loops close nobody
            self.actors.abandon(life, self._number)


def _forward(name: str, method: str) -> Callable[..., Awaitable[Any]]:
    async def forwarded(self: RemoteAgent, states: Any) -> Any:
        """As the agent's own."""
        return await self._ask(method, states)

    forwarded.__name__, forwarded.__qualname__ = method, f"{name}.{method}"
    return forwarded


def _kill(actor: Any) -> None:
    ray = import_ray()
    with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
        ray.kill(actor)


def _hosted_by_dead(where: str, reason: str) -> InfraError:
    return InfraError(f"{where}: expected the environment's actor to live, got its death: {reason}")


def _no_plain_data(where: str, error: BaseException) -> ContractError:
    return ContractError(
        f"{where}: expected data that can be pickled, got {type(error).__name__}: {error}. "
        "Return text, numbers and messages; --env_actors moves them between processes."
    )
