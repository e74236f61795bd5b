"""The parent's side of one worker process: start, load, run, kill. All calls block; see `pool.py`."""

from __future__ import annotations

import contextlib
import json
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
_LOAD_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_MAX_FRAME_BYTES = 16 << 20

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

    cpu_s: float | None
    """None sets no limit, as for the next but one."""
    wall_s: float
    memory_bytes: int | None = None


_ERRORS = {"timeout": WorkerTimeout, "data": DataError, "contract": ContractError, "failed": WorkerFailed}


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
        self.loaded: set[Key] = set()
        self.num_tasks = 0
        self.at_rest = False
        """True if it answered its last request and may serve another."""
        self._num_frames = 0
        self._cpu_s_at_rest = 0.0
        self._socket, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=python_env() | {"PYTHONHASHSEED": "0"},
                start_new_session=True,  # so that processes of a user's function are killed with it
            )
        except OSError as error:
            self._socket.close()
            raise Lost(f"cannot start a worker: {error}") from error
        finally:
            theirs.close()
        with contextlib.ExitStack() as failure:
            failure.callback(self.end)
            self._greet()
            failure.pop_all()

    def _greet(self) -> None:
        """Wait until the worker is ready; tell the end of its standard error if it is not."""
        assert self.process.stderr is not None
        with self.process.stderr as errors:
            os.set_blocking(errors.fileno(), False)
            try:
                reply = self._receive(WorkerLimits(None, _LOAD_TIMEOUT_S))
            except Lost as error:
                output = (errors.read() or b"").decode(errors="replace").strip()[-500:]
                raise Lost(f"a worker did not start: {output or error}") from error
        if reply.get("ready") is not True:
            raise Lost(f"a worker did not start: it sent {str(reply)[:200]}")

    def run(self, key: Key, body: str, limits: WorkerLimits) -> dict[str, Any]:
        """Return the handler's answer; the limits start once the handler is loaded.

        Raises:
            WorkerTimeout, WorkerFailed, ContractError, DataError: see `WorkerPool.run`.
            Lost: another worker may work.
        """
        if key not in self.loaded:
            handler = json.dumps({"task": key[0], "function": key[1], "path": sys.path})
            self._exchange("load", handler, WorkerLimits(None, _LOAD_TIMEOUT_S))
            self.loaded.add(key)
        self.num_tasks += 1
        return self._exchange("run", body, limits)

    def _exchange(self, verb: str, body: str, limits: WorkerLimits) -> dict[str, Any]:
        """Send a request and return the handler's answer, or raise its error."""
        self._num_frames += 1
        head = {"id": self._num_frames, "verb": verb, "cpu_limit_s": limits.cpu_s, "memory_limit_bytes": limits[2]}
        frame = f'{json.dumps(head)[:-1]}, "request": {body}}}'.encode()
        self.at_rest = False
        self._socket.settimeout(limits.wall_s)
        try:
            self._socket.sendall(struct.pack(">I", len(frame)) + frame)
        except TimeoutError as error:
            raise Lost("a worker did not take the whole request") from error
        except OSError as error:
            raise Lost(f"a worker was gone: {error}") from error
        reply = self._receive(limits)
        if reply.get("id") != self._num_frames:
            raise Lost(f"a worker answered out of turn: {str(reply)[:200]}")
        status, result, detail = reply.get("status"), reply.get("result"), str(reply.get("detail", ""))
        if status not in _ERRORS and (status != "ok" or not isinstance(result, dict)):
            raise Lost(f"a worker sent garbage: {str(reply)[:200]}")
        self.at_rest = not reply.get("retire")
        if status in _ERRORS:
            raise _ERRORS[status](detail)
        return dict(result or {})

    def _receive(self, limits: WorkerLimits) -> dict[str, Any]:
        deadline = time.monotonic() + limits.wall_s
        size = struct.unpack(">I", self._read(4, deadline, limits))[0]
        body = self._read(size, deadline, limits) if size <= _MAX_FRAME_BYTES else b""
        try:
            reply: Any = json.loads(body)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise Lost(f"a worker sent garbage: {bytes(body[:200])!r}")
        cpu_s = reply.get("cpu_s")
        self._cpu_s_at_rest = cpu_s if isinstance(cpu_s, float) else self._cpu_s_at_rest
        return reply

    def _read(self, size: int, deadline: float, limits: WorkerLimits) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                chunk = self._socket.recv(size - len(data))
            except TimeoutError:
                used_s = process_cpu_s(self.process.pid) - self._cpu_s_at_rest
                if limits.cpu_s is not None and used_s >= limits.cpu_s:
                    raise _too_much(limits.cpu_s) from None
                raise Lost(
                    f"a worker was lost: no reply within {limits.wall_s:g} s, {used_s:.1f} s of them computing"
                ) from None
            except OSError:
                chunk = b""
            if not chunk:
                raise self._death(bytes(data), limits)
            data += chunk
        return data

    def _death(self, received: bytes, limits: WorkerLimits) -> Exception:
        """Return the error of a worker that ended: the kernel's SIGXCPU is the request's fault."""
        if received:
            return Lost(f"a worker sent garbage: {received[:40]!r}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.wait(_END_TIMEOUT_S) == -signal.SIGXCPU and limits.cpu_s is not None:
                return _too_much(limits.cpu_s)
        return Lost("a worker died during the check")

    def kill(self) -> None:
        """Kill the process and its children, which wakes the thread that waits; does not wait for their end."""
        if self.process.returncode is None:  # its id cannot be reused before we have waited for it
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Kill the process, wait for its end, and close the socket."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_TIMEOUT_S)
        self._socket.close()

    def disown(self) -> None:
        """Forget the process, which is the child of the process that this one was forked from."""
        self.process.returncode = 0
        self._socket.close()


def _too_much(cpu_s: float) -> WorkerTimeout:
    return WorkerTimeout(f"the check took more than {cpu_s:g} s of CPU time")


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, that a running process has used, from Linux's /proc; else 0.0."""
    try:
        # After the name, which may hold spaces and brackets, come fields 3 and on; 14 and 15 are utime and stime.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
