"""The process of a local actor: `python -m agentenv.episode.env_actors.process`, started by `local`.

Standard input is the socket to its parent. What an environment prints goes to standard error, and its log records go
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
from typing import Any

from agentenv.episode.env_actors.frames import LOG, Calls, Frames

END_GRACE_S = 2.0
"""Time to end after the parent has closed its end, before the process is killed with its children."""


class _Server:
    """Answers the calls of the parent with the methods of an object, which the parent's first frame makes."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.frames = Frames(self._receive, self.over.set)
        self.calls = Calls(self.frames.send, self._answer, first=LOG + 1)
        self._loop = asyncio.get_running_loop()
        self._hosted: Any = None

    def _receive(self, number: int, data: bytes) -> None:
        if self._hosted is not None:
            self.calls.receive(number, data)
            return
        path, levels, make = pickle.loads(data)
        sys.path[:] = path
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        logging.getLogger().addHandler(_LogFrames(self))
        self._hosted = pickle.loads(make)(self.calls.call)

    async def _answer(self, method: str, args: Any) -> Any:
        return await getattr(self._hosted, method)(*args)

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
