"""The driver's side: places agents on actors, calls them, and replaces actors that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from agentenv._util.brief import brief
from agentenv._util.ray.cluster import check_node
from agentenv.core.agent import AgentInstance
from agentenv.episode.env_actors.host import Failure
from agentenv.errors import AgentEnvError, ConfigError, ContractError, InfraError

logger = logging.getLogger(__name__)


class ActorLost(Exception):
    """The process of an actor is gone; the message says why."""


class Actor(Protocol):
    """A process with an EnvActor, as its caller sees it."""

    async def call(self, method: str, *args: Any, where: str) -> Any:
        """Return what a method of the EnvActor returns; cancelling this cancels the method.

        Raises:
            ActorLost: the process is gone.
            AgentEnvError: raised by the method; ContractError if something cannot be pickled.
        """

    def send(self, method: str, *args: Any) -> None:
        """Call a method without waiting for its result."""

    def kill(self) -> None:
        """End the process at once."""

    async def close(self) -> None:
        """End the process, and wait for its end."""


@dataclass(frozen=True, slots=True)
class EnvActorConfig:
    """When an actor is replaced."""

    stuck_s: float = 30.0
    """An actor whose event loop does not answer for this time is killed."""
    start_timeout_s: float = 120.0
    restart_wait_s: float = 1.0
    """Wait before an actor is replaced; doubled, up to 30 s, until an episode ends on the replacement."""
    max_restarts: int = 8
    """Maximum number of restarts of an actor without an episode that ended on it."""
    flag: str = "--env_actors"
    """The flag that messages name."""

    @classmethod
    def of(cls, step_timeout_s: float) -> EnvActorConfig:
        """Return the config for a time limit: an actor is replaced before other agents on it reach theirs."""
        return cls(stuck_s=min(max(1.0, step_timeout_s / 2), 30.0))


@dataclass(slots=True, eq=False)
class _Life:
    """One actor from its start to its death."""

    actor: Actor
    pid: int
    num_agents: int = 0
    num_served: int = 0
    lost: str | None = None
    """Why the actor is gone; None while it lives."""


@dataclass(slots=True, eq=False)
class _Host:
    """A slot for an actor; it remains when the actor dies."""

    start: Callable[[], Awaitable[Actor]]
    life: _Life | None = None
    num_deaths: int = 0
    """Deaths since an episode last ended here."""


class EnvActors:
    """Actors that host agent instances; the next instance goes to the least loaded.

    Args:
        starts: functions that start a process, one for each actor.
        config: when an actor is replaced.
    """

    def __init__(self, starts: Sequence[Callable[[], Awaitable[Actor]]], config: EnvActorConfig) -> None:
        self.config = config
        self._hosts = [_Host(start) for start in starts]
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.num_restarts = 0
        self.name = "AgentInstance"
        """Name of the agents' class."""
        self.score_range = AgentInstance.score_range

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
        """End all actors."""
        for task in self._tasks:
            task.cancel()
        ending = [*self._tasks]
        for host in self._hosts:
            life, host.life = host.life, None
            if life is not None:
                life.lost = "it was closed."
                ending.append(asyncio.ensure_future(life.actor.close()))
        if ending:
            await asyncio.wait(ending)

    def agent_class(self) -> type[AgentInstance]:
        """Return a class whose instances live in the actors, with the name of the agents' class."""
        forwarded = {method: _forward(self.name, method) for method in ("reset", "step", "on_truncate")}
        return type(self.name, (RemoteAgent,), {"actors": self, "score_range": self.score_range, **forwarded})

    def number(self) -> int:
        """Return a unique number for the next agent."""
        return next(self._numbers)

    async def place(self) -> _Life:
        """Reserve room for one agent on the least loaded actor.

        Raises:
            InfraError: no actor is alive for `stuck_s`, or none will be.
        """
        deadline = time.monotonic() + self.config.stuck_s
        while not (lives := [host.life for host in self._hosts if host.life is not None]):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or all(host.num_deaths > self.config.max_restarts for host in self._hosts):
                raise InfraError(
                    f"{self.config.flag}: expected a living actor within {self.config.stuck_s:g} s, got none of "
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
        """Release the room of an agent. `ended` is True if its episode ended there."""
        life.num_agents -= 1
        for host in self._hosts:
            if ended and host.life is life:
                host.num_deaths = 0

    def abandon(self, life: _Life, number: int) -> None:
        """Close an agent without waiting for the result."""
        if life.lost is None:
            self.leave(life, ended=False)
            life.actor.send("drop", number)

    async def ask(self, life: _Life, method: str, *args: Any, where: str) -> Any:
        """Call a method of an actor and return the result. `where` names the call in messages.

        An exception of the agent is raised here, too.

        Raises:
            InfraError: the actor is gone.
        """
        if life.lost is not None:
            raise self._dead(where, life.lost)
        try:
            outcome = await life.actor.call(method, *args, where=where)
        except ActorLost as error:
            self._lose(life, str(error))
            raise self._dead(where, life.lost or "") from error
        if isinstance(outcome, Failure):
            raise outcome.error()
        return outcome

    def pinged(self, answer: Any) -> None:
        """Take an actor's answer to a ping."""

    def _dead(self, where: str, reason: str) -> InfraError:
        return InfraError(f"{where}: expected a living process of {self.config.flag}, got a dead one: {reason}")

    # --- life and death ---------------------------------------------------------------------------------------------

    async def _start(self, host: _Host) -> None:
        life = _Life(await host.start(), pid=0)
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                life.pid, version, self.name, self.score_range = await self.ask(life, "start", where=self.config.flag)
            check_node(self.config.flag, version)
        except TimeoutError as error:
            life.actor.kill()
            raise InfraError(
                f"{self.config.flag}: expected an actor to load its environment within "
                f"{self.config.start_timeout_s:g} s, got none. Make its import quicker."
            ) from error
        except BaseException:
            life.actor.kill()
            raise
        host.life = life
        self._spawn(self._watch(life))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, life: _Life) -> None:
        """Ping an actor at intervals; it is lost after two unanswered pings."""
        num_missed, limit_s = 0, self.config.stuck_s / 2
        while life.lost is None and num_missed < 2:
            await asyncio.sleep(limit_s / 4)
            try:
                async with asyncio.timeout(limit_s):
                    self.pinged(await self.ask(life, "ping", where="ping"))
                num_missed = 0
            except TimeoutError:
                num_missed += 1
            except InfraError:
                return  # `ask` has recorded its death
        reason = (
            f"its event loop did not answer for {self.config.stuck_s:g} s: an `async def` of {self.name} blocks it."
        )
        self._lose(life, reason)

    def _lose(self, life: _Life, reason: str) -> None:
        """Kill an actor and start a replacement."""
        if life.lost is not None:
            return  # another call noticed it before
        life.lost = reason
        life.actor.kill()
        for host in self._hosts:
            if host.life is life:
                logger.warning("process %d of %s is lost: %s", life.pid, self.config.flag, reason)
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
                logger.warning("a process of %s could not be restarted: %s", self.config.flag, error)
        async with self._changed:
            self._changed.notify_all()


class RemoteAgent(AgentInstance):
    """A proxy of an agent instance in an actor, made there by `make` or at the first call."""

    actors: ClassVar[EnvActors]

    def __init__(self, **kwargs: Any) -> None:
        self._kwargs = kwargs
        self._number = self.actors.number()
        self._life: _Life | None = None

    async def make(self) -> None:
        """Make the instance in an actor."""
        life = await self.actors.place()
        try:
            await self.actors.ask(life, "make", self._number, self._kwargs, where=f"{type(self).__name__}()")
        except BaseException:
            self.actors.abandon(life, self._number)
            raise
        self._life = life

    async def close(self) -> None:
        """Close the instance, unless its actor is gone."""
        life, self._life = self._life, None
        if life is None:
            return
        self.actors.leave(life, ended=life.lost is None)
        if life.lost is None:
            await self.actors.ask(life, "drop", self._number, where=f"{type(self).__name__}.close")

    def __del__(self) -> None:
        life = getattr(self, "_life", None)
        if life is not None:  # OpenRLHF's own loops do not close agents
            self.actors.abandon(life, self._number)


async def made_agent(actors: EnvActors, kwargs: Mapping[str, Any]) -> AgentInstance:
    """Make an agent in one of the actors, and return its proxy."""
    cls: Any = actors.agent_class()
    agent: RemoteAgent = cls(**kwargs)
    await agent.make()
    return agent


def _forward(name: str, method: str) -> Callable[..., Awaitable[Any]]:
    async def forwarded(self: RemoteAgent, states: Any) -> Any:
        if self._life is None:
            await self.make()
        return await self.actors.ask(self._life, "ask", self._number, method, states, where=f"{name}.{method}")  # type: ignore[arg-type]

    forwarded.__name__, forwarded.__qualname__ = method, f"{name}.{method}"
    return forwarded


def no_plain_data(where: str, error: BaseException | str) -> ContractError:
    """Return the error to raise if the arguments or the result of a call cannot be pickled."""
    got = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return ContractError(
        f"{where}: expected data that can be pickled, got {got}. "
        "Return text, numbers and messages: they are sent between processes."
    )


def check_kwargs(kwargs: Mapping[str, Any], where: str = "--env_kwargs") -> None:
    """Raise if arguments of the constructor cannot be sent to an actor.

    Raises:
        ConfigError: with the argument's name.
    """
    for name, value in kwargs.items():
        try:
            pickle.dumps(value)
        except (pickle.PickleError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{where}: {name}: expected a value that can be pickled for another process, got {brief(value)} "
                f"({error}). Pass what it is made from, or env_actors 0."
            ) from error
