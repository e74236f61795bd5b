"""The process of a local actor, `python -m agentenv.episode.env_actors.process`, and the calls between it and `local`.

Calls go in both directions as frames: a number and pickled data.

Standard input is the socket to its parent. What an environment prints goes to standard error, and its log records go
to the loggers of the parent. The process ends with its parent, also while an environment blocks its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from logging.handlers import QueueHandler
from typing import Any, cast

from agentenv.errors import AgentEnvError

LOG = 0
"""Number of the frames of log records; calls have higher ones: those of the parent are even, those of the actor odd."""

_HEAD = struct.Struct(">QQ")


class Frames(asyncio.Protocol):
    """Sends frames and receives them, those of one tick of the loop together; both ends of a socket have one.

    Args:
        receive: called with the number and the data of each frame.
        lose: called when the other end is gone.
    """

    def __init__(self, receive: Callable[[int, bytes], None], lose: Callable[[], None]) -> None:
        self._receive, self._lose = receive, lose
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._received = bytearray()

    def send(self, number: int, data: bytes) -> None:
        """Send a frame at the end of this tick of the loop: many small ones cost one system call."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += (_HEAD.pack(number, len(data)), data)

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None and not self._transport.is_closing():
            end: socket.socket = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # a forked process may have a copy, which closing does not end
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; see asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass on what is complete."""
        self._received += data
        start = 0
        while len(self._received) - start >= _HEAD.size:
            number, size = _HEAD.unpack_from(self._received, start)
            end = start + _HEAD.size + size
            if len(self._received) < end:
                break
            self._receive(number, bytes(self._received[start + _HEAD.size : end]))
            start = end
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        self._lose()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))


class Calls:
    """Calls of the other end, and answers to its calls. A call without data cancels the one with its number.

    Args:
        send: sends a frame.
        answer: the function that answers calls: a method's name and its arguments.
        first: number of the first call; the numbers of the two ends differ in parity.
    """

    def __init__(
        self, send: Callable[[int, bytes], None], answer: Callable[[str, Any], Awaitable[Any]], *, first: int
    ) -> None:
        self._send, self._answer = send, answer
        self._parity = first % 2
        self._numbers = itertools.count(first, 2)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def call(self, data: bytes) -> bytes:
        """Send a call, the pickle of a method's name and its arguments, and return the pickle of its outcome."""
        number = next(self._numbers)
        reply = self._waiting[number] = self._loop.create_future()
        self._send(number, data)
        try:
            outcome: bytes = await reply
        except asyncio.CancelledError:
            self._send(number, b"")
            raise
        finally:
            self._waiting.pop(number, None)
        return outcome

    def tell(self, data: bytes) -> None:
        """Send a call without waiting for its outcome."""
        self._send(next(self._numbers), data)

    def receive(self, number: int, data: bytes) -> None:
        """Take a frame: the reply to a call of this end, or a call of the other end."""
        if number % 2 == self._parity:
            if (reply := self._waiting.get(number)) is not None and not reply.done():
                reply.set_result(data)
        elif data:
            task = self._answering[number] = self._loop.create_task(self._reply(number, data))
            task.add_done_callback(lambda _: self._answering.pop(number))
        elif number in self._answering:
            self._answering[number].cancel()

    def fail(self, error: Exception) -> None:
        """Raise an error in all calls that wait, and cancel the answers: the other end is gone."""
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)
        for task in self._answering.values():
            task.cancel()

    async def _reply(self, number: int, data: bytes) -> None:
        try:
            method, args = pickle.loads(data)
            outcome = pickle.dumps(("returned", await self._answer(method, args)), pickle.HIGHEST_PROTOCOL)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # otherwise the function made it, and the caller waits for an outcome
            outcome = pickle.dumps(("unpicklable", f"{type(error).__name__}: {error}"))
            if isinstance(error, AgentEnvError):
                with contextlib.suppress(Exception):  # as of a class in a function
                    outcome = pickle.dumps(("raised", error))
        self._send(number, outcome)


END_GRACE_S = 2.0
"""Time to end after the parent has closed its end, before the process is killed with its children."""


class _Server:
    """Answers the calls of the parent with the methods of an object, which the parent's first frame makes."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.frames = Frames(self._receive, self.over.set)
        self.calls = Calls(self.frames.send, lambda method, args: getattr(self._hosted, method)(*args), first=LOG + 1)
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
