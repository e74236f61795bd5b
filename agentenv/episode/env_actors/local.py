"""Actors that are processes of this machine, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from agentenv._util.paths import python_env
from agentenv._util.virtual_time import external_work
from agentenv.core.agent import AgentInstance
from agentenv.episode.env_actors.actors import ActorLost, EnvActorConfig, EnvActors, made_agent, no_plain_data
from agentenv.episode.env_actors.host import Spec, host_env
from agentenv.episode.env_actors.process import END_GRACE_S, LOG, Calls, Frames
from agentenv.errors import ContractError, InfraError

Answer = Callable[[str, Any], Awaitable[Any]]
"""Answers the calls of an actor: a method's name and its arguments."""
CallParent = Callable[[bytes], Awaitable[bytes]]
"""Calls this process from an actor; see `Calls.call`."""
MakeHosted = Callable[[CallParent], Any]
"""Makes the object that an actor hosts; sent to the actor."""
_MODULE = "agentenv.episode.env_actors.process"
_LOGGERS = ("", "agentenv")
"""Loggers whose levels the processes get."""
_EXIT_S = 0.5
"""Time between the end of a process's connection and its exit code."""


async def no_calls(method: str, args: Any) -> Any:
    """Refuse all calls of an actor."""
    raise ContractError(f"{method}: expected no calls of an actor, got one. Report it.")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@asynccontextmanager
async def open_local_actors(spec: Spec, num: int, config: EnvActorConfig) -> AsyncIterator[EnvActors]:
    """Start `num` processes, yield their actors, and end them.

    Raises:
        ConfigError: a process cannot load the class.
        InfraError: a process did not start.
    """
    actors = EnvActors([partial(LocalActor.start, partial(host_env, spec))] * num, config)
    try:
        await actors.start()
        yield actors
    finally:
        await actors.close()


class LocalActor:
    """An object in a process of this machine; see `Actor`. It belongs to the event loop that started it."""

    def __init__(self, process: subprocess.Popen[bytes], answer: Answer) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(self._receive, self._lose)
        self._calls = Calls(self._frames.send, answer, first=LOG + 2)
        self._lost: str | None = None

    @classmethod
    async def start(cls, make: MakeHosted, flag: str = "--env_actors", answer: Answer = no_calls) -> LocalActor:
        """Start a process that makes the object, whose calls of this process `answer` answers.

        Raises:
            InfraError: the system refuses another one; the message names the flag.
        """
        levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        first = pickle.dumps((sys.path, levels, pickle.dumps(make)))
        ours, theirs = socket.socketpair()
        try:
            actor = cls(_start_process(theirs), answer)
        except OSError as error:
            ours.close()
            raise InfraError(f"{flag}: expected a process to start, got {error}. Lower {flag}.") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        await actor._loop.create_connection(lambda: actor._frames, sock=ours)
        actor._frames.send(LOG, first)
        return actor

    async def call(self, method: str, *args: Any, where: str) -> Any:
        """Call a method of the object."""
        if self._lost is not None:
            raise ActorLost(self._lost)
        try:
            data = pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a user's class may raise anything
            raise no_plain_data(where, error) from error
        with external_work():
            reply = await self._calls.call(data)
        try:
            status, value = pickle.loads(reply)
        except Exception as error:  # as above
            raise no_plain_data(where, error) from error
        if status == "raised":
            raise value
        if status == "unpicklable":
            raise no_plain_data(where, value)
        return value

    def send(self, method: str, *args: Any) -> None:
        """Call a method without waiting for its result, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._calls.tell, pickle.dumps((method, args)))

    def kill(self) -> None:
        """Kill the process and its children."""
        self._disconnect()
        if self._process.returncode is None:  # its id cannot be reused before we have waited for it
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        threading.Thread(target=self._process.wait, daemon=True).start()

    async def close(self) -> None:
        """Let the process end, and kill it if it does not."""
        self._disconnect()
        try:
            await asyncio.to_thread(self._process.wait, END_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self._process.wait)

    def _disconnect(self) -> None:
        self._lost = self._lost or "it was closed"
        self._frames.close()

    def _lose(self) -> None:
        """Find out why the process has closed its end, and tell the callers."""
        if self._lost is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            code = self._process.returncode
            how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
            self._lost = f"process {self._process.pid} ended with {how}"
        self._calls.fail(ActorLost(self._lost))

    def _receive(self, number: int, data: bytes) -> None:
        if number == LOG:
            record: logging.LogRecord = pickle.loads(data)
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        else:
            self._calls.receive(number, data)


def _start_process(end: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=end.fileno(),
        env=python_env(),
        start_new_session=True,  # Ctrl-C is for this process only, and processes of agents are killed with theirs
    )


class LocalEnv:
    """Makes agents of one class in local actors, which start with the first agent; for one event loop.

    Args:
        spec: the class.
        kwargs: arguments of its constructor.
        num: number of actors.
        config: when an actor is replaced.
    """

    def __init__(self, spec: Spec, kwargs: Mapping[str, Any], num: int, config: EnvActorConfig) -> None:
        self._spec, self._kwargs, self._num, self._config = spec, kwargs, num, config
        self.forget()

    def forget(self) -> None:
        """Drop the actors without ending them, as after a fork: they belong to another process."""
        self._pid = os.getpid()
        self._stack: AsyncExitStack | None = None
        self._opening: asyncio.Future[EnvActors] | None = None

    async def make(self) -> AgentInstance:
        """Make an agent.

        Raises:
            ConfigError: the processes cannot load the class.
            InfraError: no process is alive.
        """
        if self._pid != os.getpid():
            self.forget()
        if self._opening is None:
            self._stack = AsyncExitStack()
            opening = open_local_actors(self._spec, self._num, self._config)
            self._opening = asyncio.ensure_future(self._stack.enter_async_context(opening))
            self._opening.add_done_callback(self._opened)
        actors = await asyncio.shield(self._opening)
        return await made_agent(actors, self._kwargs)

    def _opened(self, opening: asyncio.Future[EnvActors]) -> None:
        if opening is self._opening and (opening.cancelled() or opening.exception() is not None):
            self.forget()  # the next agent tries again

    async def close(self) -> None:
        """End the actors; the next agent starts new ones."""
        stack, opening, is_own = self._stack, self._opening, self._pid == os.getpid()
        self.forget()
        if is_own and opening is not None and stack is not None:
            await asyncio.wait({opening})
            await stack.aclose()
