"""Run graders of untrusted text in worker processes that can be killed, one request at a time each, with limits.

There are two limits, because a machine may be busy. A request that *computes* too long is at fault (`WorkerTimeout`); a
worker that does not answer although it hardly computed is lost and replaced, like one that died (`WorkerFailed`). Both
limits start when a worker takes the request: neither waiting for a free worker nor loading a handler counts.

A request names its handler as its `task`. The worker speaks length-prefixed JSON over a socket pair (its standard input
and output), with plain sockets, not asyncio transports, so that it outlives an event loop and serves the next one.

Example:
    >>> await shared_pool().run({"task": "rewards.py:handle", "answer": "1/2"}, cpu_limit_s=2.0)
    {'status': 'ok', 'correct': True, 'detail': ''}
"""

from __future__ import annotations

import asyncio
import atexit
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
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from agentenv._util.calls import waiting
from agentenv._util.paths import python_env
from agentenv._util.per_loop import PerLoop
from agentenv._util.virtual_time import external_work
from agentenv.core.arguments import whole_number
from agentenv.errors import ContractError, DataError, InfraError

MEMORY_LIMIT_BYTES = 4 << 30
"""Default limit on the address space of a request."""
_WORKER_MODULE = "agentenv.rewards.workers.main"
_WALL_PER_CPU = 10.0
_MIN_WALL_S = 30.0
_MAX_ATTEMPTS = 2
_MOST_SHARED_WORKERS = 16
_PROC = Path("/proc")
_LOAD_TIMEOUT_S = 60.0
_MAX_FRAME_BYTES = 16 << 20
_CPU_GRACE_S = 1.0
"""CPU time beyond the limit before a worker is killed: the time to interrupt itself and report it."""
_POLL_S = 0.5

Key = tuple[str, str]
"""What a worker must load before it can grade: a task, and the function that it calls, if any."""


# --- one worker -------------------------------------------------------------------------------------------------------


def process_cpu_s(pid: int) -> float | None:
    """Return the CPU seconds, user and system, that a running process has used, to 10 ms; None if unknown.

    It reads Linux's /proc; elsewhere what a worker cannot interrupt itself ends by its wall limit.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # After the name, which may hold spaces and brackets, come fields 3 and on; 14 and 15 are utime and stime.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


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
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.socket, data)
        except OSError as error:
            raise Lost(f"a worker was gone: {error}") from error
        finally:
            loop.remove_writer(self.socket.fileno())

    async def _receive(self, limits: WorkerLimits) -> dict[str, Any]:
        """Wait for one frame. The reader is removed synchronously: a late removal would hit a reused descriptor."""
        loop = asyncio.get_running_loop()
        frame: asyncio.Future[bytes | None] = loop.create_future()
        descriptor = self.socket.fileno()

        def on_readable() -> None:
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

        loop.add_reader(descriptor, on_readable)
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


# --- the pool ---------------------------------------------------------------------------------------------------------


class WorkerPool:
    """A pool of worker processes that start on demand; each event loop gets up to `num_workers`.

    A request may compute for its `cpu_limit_s`. A worker that exceeds that is killed about a second of computing later.
    In any case it is killed ten times `cpu_limit_s`, at least 30 s, after it took the request. A worker is replaced
    after `max_tasks_per_worker` requests.

    Raises:
        ConfigError: an argument is not a whole number above 0.
    """

    def __init__(self, *, num_workers: int = 2, max_tasks_per_worker: int = 2000) -> None:
        self._num_workers = whole_number("WorkerPool.num_workers", num_workers, low=1)
        self._max_tasks = whole_number("WorkerPool.max_tasks_per_worker", max_tasks_per_worker, low=1)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()  # guards the containers below: event loops of several threads share them
        self._free = PerLoop(lambda: asyncio.Semaphore(self._num_workers))
        self._busy: dict[Worker, asyncio.AbstractEventLoop] = {}
        """With the loop whose request it serves."""
        self._idle: list[Worker] = []
        self._dying: list[subprocess.Popen[bytes]] = []
        self._num_closes = 0

    async def run(
        self,
        request: dict[str, Any],
        *,
        cpu_limit_s: float = 2.0,
        memory_limit_bytes: int | None = MEMORY_LIMIT_BYTES,
    ) -> dict[str, Any]:
        """Return the result of the handler of `request["task"]`; waiting for a free worker counts toward no limit.

        Request and result are plain JSON. `memory_limit_bytes` None sets no limit.

        Raises:
            WorkerTimeout: the request exceeded its CPU time or memory.
            WorkerFailed: the request lost two workers, none could start, the handler could not be loaded or raised, or
                the pool was closed meanwhile.
            DataError: the handler reports that the row cannot be graded, or the request is not JSON.
        """
        limits = WorkerLimits(cpu_limit_s, max(_WALL_PER_CPU * cpu_limit_s, _MIN_WALL_S), memory_limit_bytes)
        body = encode(request)
        if self._pid != os.getpid():  # forked: the workers are the parent's
            self._drop_inherited()
        with self._lock:
            ended = [worker for worker, loop in self._busy.items() if loop.is_closed()]
            for worker in ended:
                del self._busy[worker]
            self._dying = [process for process in self._dying if process.poll() is None]
        for worker in ended:
            self._kill(worker)
            worker.release()
        num_closes = self._num_closes
        async with contextlib.AsyncExitStack() as slots:
            with waiting():
                await slots.enter_async_context(self._free.here())
            for attempt in count(1):
                if self._num_closes != num_closes:
                    raise WorkerFailed("the grader was closed during the check")
                try:
                    with external_work():
                        return await self._run_once(request, body, limits)
                except Lost as error:
                    if attempt == _MAX_ATTEMPTS:
                        raise WorkerFailed(f"{error} ({attempt} attempts)") from error
        raise AssertionError("unreachable: count() has no end")

    async def _run_once(self, request: dict[str, Any], body: str, limits: WorkerLimits) -> dict[str, Any]:
        key = (str(request.get("task")), str(request.get("function", "")))
        worker = self._take_idle(lambda worker: key in worker.loaded) or self._take_idle(lambda worker: True)
        if worker is None:
            worker = Worker([sys.executable, "-P", "-m", _WORKER_MODULE, str(self._pid)])
        with self._lock:
            self._busy[worker] = asyncio.get_running_loop()
        try:
            return await worker.run(key, body, limits)
        finally:  # a cancelled request leaves its worker in the middle of it, so that worker goes
            with self._lock:
                self._busy.pop(worker, None)
                keep = worker.at_rest and not worker.killed and worker.num_tasks < self._max_tasks
                if keep:
                    self._idle.append(worker)
            if not keep:
                self._kill(worker)
                worker.release()

    def _take_idle(self, fits: Callable[[Worker], bool]) -> Worker | None:
        """Remove and return the youngest idle worker that is alive and fits."""
        while True:
            with self._lock:
                worker = next(filter(fits, reversed(self._idle)), None)
                if worker is None:
                    return None
                self._idle.remove(worker)
            if worker.process.poll() is None:
                return worker
            self._kill(worker)
            worker.release()

    def _drop_inherited(self) -> None:
        workers = self._workers()
        for worker in workers:
            worker.release()
        for process in [*self._dying, *(worker.process for worker in workers)]:
            process.returncode = 0  # not our child: keeps Popen from waiting for it
        self._reset()

    def _workers(self) -> list[Worker]:
        return [*self._idle, *self._busy]

    def _kill(self, worker: Worker) -> None:
        if not worker.killed:
            worker.kill()
            self._dying.append(worker.process)

    def _kill_all(self) -> None:
        self._num_closes += 1
        with self._lock:
            workers, idle = self._workers(), self._idle
            self._idle = []
        for worker in workers:
            self._kill(worker)  # the caller that waits for a busy one reads its end, and releases it
        for worker in idle:
            worker.release()

    async def close(self) -> None:
        """Kill the workers and wait for their end; running checks fail, later ones start new workers."""
        if self._pid != os.getpid():
            self._drop_inherited()
        self._kill_all()
        while self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._dying.pop().wait, 5)

    def close_now(self) -> None:
        """Close without an event loop, at the end of the process."""
        if self._pid != os.getpid():
            return
        self._kill_all()
        while self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._dying.pop().wait(5)


_shared: dict[str, WorkerPool] = {}
_shared_lock = Lock()  # guards `_shared` when two threads ask first


def shared_pool(name: str = "rewards") -> WorkerPool:
    """Return the process-wide pool of that name, created at the first call and closed at the end of the process.

    Our own rewards share one; `functions` keeps user functions from occupying their workers. Each has a quarter as many
    workers as the machine has processors, at least two.
    """
    with _shared_lock:
        if name not in _shared:
            num_workers = max(2, min(_MOST_SHARED_WORKERS, (os.cpu_count() or 1) // 4))
            _shared[name] = WorkerPool(num_workers=num_workers)
            atexit.register(_shared[name].close_now)
        return _shared[name]
