"""One worker process as the pool holds it: start, load, run, kill; see `pool.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from agentenv.errors import DataError, InfraError
from agentenv.rewards._cpu_time import process_cpu_s

_LOAD_TIMEOUT_S = 60.0
_MAX_FRAME_BYTES = 16 << 20
_CPU_GRACE_S = 1.0
"""What a worker may compute beyond the limit before it is killed: the time to interrupt itself and say so."""
_POLL_S = 0.5
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

Key = tuple[str, str]
"""What a worker has to load before it can judge: a task, and the function that it calls, if any."""


class WorkerTimeout(Exception):
    """The request took more processor time, or memory, than it may."""


class WorkerFailed(InfraError):
    """No worker could answer: it died, hung, spoke garbage, could not start, its handler raised, or it was closed."""


class Lost(Exception):
    """This worker is of no more use; another one may do."""


class Limits(NamedTuple):
    """What one request may take."""

    cpu_s: float
    wall_s: float
    memory_bytes: int | None = None


def encoded(request: dict[str, Any]) -> str:
    """The request as JSON.

    Raises:
        DataError: it is none, or longer than a worker reads.
    """
    try:
        body = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"request: expected JSON values, got {error}. Mend the row's label or columns.") from error
    if len(body) > _MAX_FRAME_BYTES // 2:
        raise DataError(f"request: expected at most {_MAX_FRAME_BYTES // 2} characters, got {len(body)}. Shorten it.")
    return body


def _environment() -> dict[str, str]:
    """Lets the worker import this very package, also from a checkout that is not installed."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if _PACKAGE_ROOT.name not in ("site-packages", "dist-packages"):
        paths.append(str(_PACKAGE_ROOT))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONHASHSEED": "0"}


class Worker:
    """One process and the parent's end of its socket.

    Raises:
        Lost: it cannot be started.
    """

    def __init__(self, command: list[str]) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,  # what a user's function starts ends with it
            )
        except BaseException as error:
            self.socket.close()
            raise Lost(f"cannot start a worker: {error}") if isinstance(error, OSError) else error from error
        finally:
            theirs.close()
        self.socket.setblocking(False)
        self.ready = False
        self.killed = False
        self.at_rest = False
        """Whether it answered its last request and may serve another."""
        self.loaded: set[Key] = set()
        self.num_tasks = 0
        self._num_frames = 0
        self._cpu_s_at_rest = 0.0
        self._received = bytearray()

    async def run(self, key: Key, body: str, limits: Limits) -> dict[str, Any]:
        """The handler's answer; the limits begin when all that it needs is loaded.

        Raises:
            WorkerTimeout, WorkerFailed, DataError: see `WorkerPool.run`.
            Lost: another worker may do.
        """
        if not self.ready:
            await self._wait_ready()
        if key not in self.loaded:
            loading = Limits(math.inf, _LOAD_TIMEOUT_S)
            what = json.dumps({"task": key[0], "function": key[1], "path": sys.path})
            await self._exchange("load", what, loading)
            self.loaded.add(key)
        self.num_tasks += 1
        return await self._exchange("run", body, limits)

    async def _wait_ready(self) -> None:
        try:
            reply = await self._receive(Limits(math.inf, _LOAD_TIMEOUT_S))
        except Lost as error:
            raise Lost(f"a worker did not start: {self._last_words() or error}") from error
        if reply.get("ready") is not True:
            raise Lost(f"a worker did not start: it sent {str(reply)[:200]}")
        self.ready = True
        self._close_errors()

    async def _exchange(self, verb: str, body: str, limits: Limits) -> dict[str, Any]:
        """Send a request and wait for what the handler gives, or raise what it raised."""
        self._num_frames += 1
        head = {"id": self._num_frames, "verb": verb, "cpu_limit_s": limits.cpu_s, "memory_limit_bytes": limits[2]}
        frame = f'{json.dumps(head)[:-1]}, "request": {body}}}'.encode()
        self.at_rest = False
        try:
            async with asyncio.timeout(limits.wall_s):
                await self._send(struct.pack(">I", len(frame)) + frame)
        except TimeoutError as error:
            raise Lost("a worker did not take the whole request") from error
        reply = await self._receive(limits)
        if reply.get("id") != self._num_frames:
            raise Lost(f"a worker answered out of turn: {str(reply)[:200]}")
        return self._result(reply)

    def _result(self, reply: dict[str, Any]) -> dict[str, Any]:
        status, result, detail = reply.get("status"), reply.get("result"), str(reply.get("detail", ""))
        failures = {"timeout": WorkerTimeout, "data": DataError, "failed": WorkerFailed}
        if status not in failures and (status != "ok" or not isinstance(result, dict)):
            raise Lost(f"a worker sent garbage: {str(reply)[:200]}")
        self.at_rest = not reply.get("retire")
        if status in failures:
            raise failures[status](detail)
        return dict(result or {})

    async def _send(self, data: bytes) -> None:
        """Sends all of it; the writer is removed in step, as the reader is."""
        left = memoryview(data)
        loop = asyncio.get_running_loop()
        while True:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                pass
            except OSError as error:
                raise Lost(f"a worker was gone: {error}") from error
            if not left:
                return
            writable = asyncio.Event()
            loop.add_writer(self.socket.fileno(), writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(self.socket.fileno())

    async def _receive(self, limits: Limits) -> dict[str, Any]:
        """Waits for one frame. The reader is removed by hand, in step: a late removal would hit a reused descriptor."""
        loop = asyncio.get_running_loop()
        frame: asyncio.Future[bytes | None] = loop.create_future()
        descriptor = self.socket.fileno()
        loop.add_reader(descriptor, self._on_readable, frame)
        try:
            await self._wait(frame, limits)
        finally:
            loop.remove_reader(descriptor)
        reply = self._decode(frame.result())
        cpu_s = reply.get("cpu_s")
        self._cpu_s_at_rest = cpu_s if isinstance(cpu_s, float) else self._cpu_s_at_rest
        return reply

    async def _wait(self, frame: asyncio.Future[bytes | None], limits: Limits) -> None:
        """Until the frame is there. Where nobody can tell how much the worker computed, it counts as lost."""
        deadline = time.monotonic() + limits.wall_s
        pause_s = limits.cpu_s + _CPU_GRACE_S  # it cannot have computed longer than that before
        while True:
            await asyncio.wait({frame}, timeout=min(pause_s, max(0.0, deadline - time.monotonic())))
            if frame.done():
                return
            late = time.monotonic() >= deadline
            total_s = process_cpu_s(self.process.pid)
            used_s = 0.0 if total_s is None else total_s - self._cpu_s_at_rest
            if used_s >= limits.cpu_s + (0.0 if late else _CPU_GRACE_S):
                raise WorkerTimeout(f"the check took more than {limits.cpu_s:g} s of CPU time")
            if late:
                raise Lost(f"a worker was lost: no reply within {limits.wall_s:g} s, {used_s:.1f} s of them computing")
            pause_s = _POLL_S

    def _on_readable(self, frame: asyncio.Future[bytes | None]) -> None:
        if frame.done():
            return
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        size = struct.unpack(">I", self._received[:4])[0] if len(self._received) >= 4 else 0
        if not data or size > _MAX_FRAME_BYTES:
            frame.set_result(None)
        elif len(self._received) >= 4 + size > 4:
            frame.set_result(bytes(self._received[4 : 4 + size]))
            del self._received[: 4 + size]

    def _decode(self, body: bytes | None) -> dict[str, Any]:
        if body is None:
            received = bytes(self._received[:40])
            raise Lost(f"a worker sent garbage: {received!r}" if received else "a worker died during the check")
        try:
            reply = json.loads(body)
        except ValueError as error:
            raise Lost(f"a worker sent garbage: {body[:200]!r}") from error
        if not isinstance(reply, dict):
            raise Lost(f"a worker sent garbage: {body[:200]!r}")
        return reply

    def _last_words(self) -> str:
        """The end of what a worker that could not start wrote to its standard error."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        words = self.process.stderr.read() or b""
        return words.decode(errors="replace").strip()[-500:]

    def kill(self) -> None:
        """Kills it and what it started, which wakes whoever waits for its reply; does not wait for its end."""
        self.killed = True
        if self.process.returncode is None:  # nobody else can have its number before we have asked for its end
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes the parent's descriptors; only for a worker that nobody waits for."""
        self.socket.close()
        self._close_errors()

    def _close_errors(self) -> None:
        if self.process.stderr is not None:
            self.process.stderr.close()
