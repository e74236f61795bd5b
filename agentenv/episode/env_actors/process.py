"""The process of a local actor: `python -m agentenv.episode.env_actors.process`, started by `local`.

Standard input is the socket to its parent. What the environment prints goes to standard error, and its log records go
to the loggers of the parent. The process ends with its parent, also while an environment blocks its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from logging.handlers import QueueHandler

from agentenv.episode.env_actors.frames import LOG, Frames
from agentenv.episode.env_actors.host import EnvActor
from agentenv.errors import AgentEnvError

END_GRACE_S = 2.0
"""Time to end after the parent has closed its end, before the process is killed with its children."""


class _Server:
    """Answers the frames of the parent: a call has a number, a method and arguments, and method None cancels it."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.frames = Frames(self._receive, self.over.set)
        self._loop = asyncio.get_running_loop()
        self._actor: EnvActor | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}

    def _receive(self, number: int, data: bytes) -> None:
        if self._actor is None:  # the first frame
            path, levels, spec = pickle.loads(data)
            sys.path[:] = path
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            logging.getLogger().addHandler(_LogFrames(self))
            self._actor = EnvActor(pickle.loads(spec))
            return
        if not data:
            if number in self._calls:
                self._calls[number].cancel()
            return
        self._calls[number] = self._loop.create_task(self._answer(number, data))

    async def _answer(self, number: int, data: bytes) -> None:
        try:
            reply = await self._reply(data)
        finally:
            del self._calls[number]
        self.frames.send(number, reply)

    async def _reply(self, data: bytes) -> bytes:
        try:
            method, args = pickle.loads(data)
            return pickle.dumps(("returned", await getattr(self._actor, method)(*args)), pickle.HIGHEST_PROTOCOL)
        except AgentEnvError as error:
            return pickle.dumps(("raised", error))
        except Exception as error:  # noqa: BLE001 - of pickle or of a user's class; the parent raises ContractError
            return pickle.dumps(("unpicklable", f"{type(error).__name__}: {error}"))

    def send_log(self, data: bytes) -> None:
        """Send a log record from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.frames.send, LOG, data)


class _LogFrames(QueueHandler):
    def __init__(self, server: _Server) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # `enqueue` replaces the queue
        self._server = server

    def enqueue(self, record: logging.LogRecord) -> None:
        self._server.send_log(pickle.dumps(record))


def _end_with_parent(fd: int) -> None:
    """Kill this process and its children if it is still here some time after the parent closed its end."""
    hangup = select.poll()
    hangup.register(fd, 0)
    hangup.poll()
    time.sleep(END_GRACE_S)
    os.killpg(0, signal.SIGKILL)


async def _serve(parent: socket.socket) -> None:
    server = _Server()
    await asyncio.get_running_loop().create_connection(lambda: server.frames, sock=parent)
    await server.over.wait()


def main() -> None:
    """Serve until the parent closes its end."""
    parent = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.dup(parent.fileno()),), daemon=True).start()
    asyncio.run(_serve(parent))


if __name__ == "__main__":
    main()
