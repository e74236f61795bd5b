"""The parent's side of one worker process: start, load, run, kill; see `pool.py`."""

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

from agentenv._util.paths import python_env
from agentenv.errors import ContractError, DataError, InfraError

_PROC = Path("/proc")
_PS_TIMEOUT_S = 2.0


def process_cpu_s(pid: int) -> float | None:
    """Return the CPU seconds, user and system, that a running process has used; None if unknown.

    On Linux this reads /proc (resolution 10 ms, within microseconds); elsewhere, such as on macOS, it runs `ps`.
    """
    try:
        # After the name, which may hold spaces and brackets, come fields 3 and on; 14 and 15 are utime and stime.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        pass
    command = ["ps", "-o", "time=", "-p", str(pid)]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_PS_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return ps_seconds(output)


def ps_seconds(time: str) -> float | None:
    """Return the seconds of a time as `ps` writes it, `[[days-]hours:]minutes:seconds[.hundredths]`, or None."""
    days, _, clock = time.strip().rpartition("-")
    try:
        seconds = 0.0
        for part in clock.split(":"):
            seconds = seconds * 60 + float(part)
        return seconds + int(days or 0) * 86400
    except ValueError:
        return None


_LOAD_TIMEOUT_S = 60.0
_MAX_FRAME_BYTES = 16 << 20
_CPU_GRACE_S = 1.0
"""CPU time beyond the limit before a worker is killed: the time to interrupt itself and report it."""
_POLL_S = 0.5

Key = tuple[str, str]
"""What a worker must load before it can grade: a task, and the function that it calls, if any."""


class WorkerTimeout(Exception):
    """The request exceeded its CPU time, or memory."""


class WorkerFailed(InfraError):
    """No worker could answer: it died, hung, sent garbage, could not start, its handler raised, or it was closed."""


class Lost(Exception):
    """This worker cannot be used any more; another one may work."""


class WorkerLimits(NamedTuple):
    """Limits of one request."""

    cpu_s: float
    wall_s: float
    memory_bytes: int | None = None


def encode(request: dict[str, Any]) -> str:
    """Return the request as JSON.

    Raises:
        DataError: it is not JSON, or longer than a worker accepts.
    """
    try:
        body = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"request: expected JSON values, got {error}. Fix the row's label or columns.") from error
    if len(body) > _MAX_FRAME_BYTES // 2:
        raise DataError(f"request: expected at most {_MAX_FRAME_BYTES // 2} characters, got {len(body)}. Shorten it.")
    return body


class Worker:
    """One process and the parent's end of its socket.

    Raises:
        Lost: it cannot start.
    """

    def __init__(self, command: list[str]) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=python_env() | {"PYTHONHASHSEED": "0"},
                start_new_session=True,  # so that processes of a user's function are killed with it
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
        """True if it answered its last request and may serve another."""
        self.loaded: set[Key] = set()
        self.num_tasks = 0
        self._num_frames = 0
        self._cpu_s_at_rest = 0.0
        self._received = bytearray()

    async def run(self, key: Key, body: str, limits: WorkerLimits) -> dict[str, Any]:
        """Return the handler's answer; the limits start once the handler is loaded.

        Raises:
            WorkerTimeout, WorkerFailed, DataError: see `WorkerPool.run`.
            Lost: another worker may work.
        """
        if not self.ready:
            try:
                reply = await self._receive(WorkerLimits(math.inf, _LOAD_TIMEOUT_S))
            except Lost as error:
                # The end of the standard error of the worker.
                assert self.process.stderr is not None
                os.set_blocking(self.process.stderr.fileno(), False)
                output = (self.process.stderr.read() or b"").decode(errors="replace").strip()[-500:]
                raise Lost(f"a worker did not start: {output or error}") from error
            if reply.get("ready") is not True:
                raise Lost(f"a worker did not start: it sent {str(reply)[:200]}")
            self.ready = True
            self._close_errors()
        if key not in self.loaded:
            loading = WorkerLimits(math.inf, _LOAD_TIMEOUT_S)
            handler = json.dumps({"task": key[0], "function": key[1], "path": sys.path})
            await self._exchange("load", handler, loading)
            self.loaded.add(key)
        self.num_tasks += 1
        return await self._exchange("run", body, limits)

    async def _exchange(self, verb: str, body: str, limits: WorkerLimits) -> dict[str, Any]:
        """Send a request and return the handler's answer, or raise its error."""
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
        status, result, detail = reply.get("status"), reply.get("result"), str(reply.get("detail", ""))
        failures = {
            "timeout": WorkerTimeout, "data": DataError, "contract": ContractError, "failed": WorkerFailed
        }  # fmt: skip
        if status not in failures and (status != "ok" or not isinstance(result, dict)):
            raise Lost(f"a worker sent garbage: {str(reply)[:200]}")
        self.at_rest = not reply.get("retire")
        if status in failures:
            raise failures[status](detail)
        return dict(result or {})

    async def _send(self, data: bytes) -> None:
        """Send all data; the writer is removed synchronously, as the reader is."""
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

    async def _receive(self, limits: WorkerLimits) -> dict[str, Any]:
        """Wait for one frame. The reader is removed synchronously: a late removal would hit a reused descriptor."""
        loop = asyncio.get_running_loop()
        frame: asyncio.Future[bytes | None] = loop.create_future()
        descriptor = self.socket.fileno()
        loop.add_reader(descriptor, self._on_readable, frame)
        try:
            await self._wait(frame, limits)
        finally:
            loop.remove_reader(descriptor)
        body = frame.result()
        if body is None:
            received = bytes(self._received[:40])
            raise Lost(f"a worker sent garbage: {received!r}" if received else "a worker died during the check")
        try:
            reply: dict[str, Any] = json.loads(body)
        except ValueError as error:
            raise Lost(f"a worker sent garbage: {body[:200]!r}") from error
        if not isinstance(reply, dict):
            raise Lost(f"a worker sent garbage: {body[:200]!r}")
        cpu_s = reply.get("cpu_s")
        self._cpu_s_at_rest = cpu_s if isinstance(cpu_s, float) else self._cpu_s_at_rest
        return reply

    async def _wait(self, frame: asyncio.Future[bytes | None], limits: WorkerLimits) -> None:
        """Wait for the frame. A worker whose CPU time is unknown counts as lost."""
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

    def kill(self) -> None:
        """Kill the process and its children, which wakes the caller that waits; does not wait for their end."""
        self.killed = True
        if self.process.returncode is None:  # its id cannot be reused before we have waited for it
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the parent's descriptors; only for a worker without a waiting caller."""
        self.socket.close()
        self._close_errors()

    def _close_errors(self) -> None:
        if self.process.stderr is not None:
            self.process.stderr.close()
