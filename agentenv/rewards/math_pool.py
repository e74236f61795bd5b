"""Worker processes that check untrusted text and can be killed: one request in flight each, limits for all.

Two limits, because a machine may be busy: a request that *computes* too long is its own fault (`WorkerTimeout`), a
worker that does not answer although it hardly computed is lost and replaced, as one that died is (`WorkerFailed`).
The pool knows nothing about mathematics: it starts `python -m <module>`, speaks length-prefixed JSON with it over a
socket pair (the worker's standard input and output), and kills what does not answer. Plain sockets, not asyncio
transports, so that the workers outlive an event loop and serve the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from agentenv.rewards._cpu_time import process_cpu_s

_STARTUP_TIMEOUT_S = 60.0
_MAX_FRAME_BYTES = 1 << 20
_MAX_ATTEMPTS = 2
_CPU_GRACE_S = 1.0
"""What a worker may compute beyond the limit before it is killed: the time to interrupt itself and say so."""
_POLL_S = 0.5
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerTimeout(Exception):
    """The request took more processor time than it may, and its worker was killed."""


class WorkerFailed(Exception):
    """No worker could answer: it died, hung, spoke garbage, could not start, or the pool was closed."""


class _Lost(Exception):
    """This worker is of no more use; another one may do."""


@dataclass(slots=True)
class _LoopState:
    """What belongs to one event loop."""

    admitted: asyncio.Semaphore
    free: asyncio.Semaphore
    busy: set[_Worker] = field(default_factory=set)


class WorkerPool:
    """Runs requests in worker processes that start at first need; each event loop gets up to `num_workers`.

    A request may compute for `cpu_limit_s`. A worker that does not keep to that is killed about a second of computing
    later; whatever it does, it is killed `wall_limit_s` after it took the request.
    """

    def __init__(
        self,
        module: str,
        *,
        num_workers: int,
        cpu_limit_s: float,
        wall_limit_s: float,
        max_pending: int,
        max_tasks_per_worker: int,
    ) -> None:
        self._command = [sys.executable, "-P", "-m", module, str(os.getpid())]
        self._num_workers = num_workers
        self._cpu_limit_s, self._wall_limit_s = cpu_limit_s, wall_limit_s
        self._max_pending = max_pending
        self._max_tasks = max_tasks_per_worker
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._command[-1] = str(self._pid)
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}
        self._idle: list[_Worker] = []
        self._dying: list[subprocess.Popen[bytes]] = []
        self._num_closes = 0

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply; waits while all workers are busy.

        Raises:
            WorkerTimeout: the worker computed for `cpu_limit_s` and did not reply.
            WorkerFailed: two workers were lost to this request, none could start, or the pool was closed meanwhile.
        """
        state = self._state()
        num_closes = self._num_closes
        async with state.admitted, state.free:
            for attempt in count(1):
                if self._num_closes != num_closes:
                    raise WorkerFailed("the grader was closed during the check")
                try:
                    return await self._run_once(state, request)
                except _Lost as error:
                    if attempt == _MAX_ATTEMPTS:
                        raise WorkerFailed(f"{error} ({attempt} attempts)") from error
        raise AssertionError

    async def _run_once(self, state: _LoopState, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._take_idle() or self._start()
        state.busy.add(worker)
        keep = False
        try:
            if not worker.ready:
                await worker.wait_ready(_STARTUP_TIMEOUT_S)
            reply = await worker.exchange(request, self._cpu_limit_s, self._wall_limit_s)
            keep = not reply.get("retire") and worker.num_tasks < self._max_tasks
            return reply
        finally:  # a cancelled request leaves its worker in the middle of it, so that worker goes
            state.busy.discard(worker)
            if keep and not worker.killed:
                self._idle.append(worker)
            else:
                self._kill(worker)
                worker.release()

    def _start(self) -> _Worker:
        try:
            return _Worker(self._command)
        except OSError as error:
            raise _Lost(f"cannot start a worker: {error}") from error

    def _take_idle(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            self._kill(worker)
            worker.release()
        return None

    def _state(self) -> _LoopState:
        if self._pid != os.getpid():  # forked: the workers are the parent's
            self._drop_inherited()
        for loop in [loop for loop in self._loops if loop.is_closed()]:
            for worker in self._loops.pop(loop).busy:
                self._kill(worker)
                worker.release()
        self._dying = [process for process in self._dying if process.poll() is None]
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            free = asyncio.Semaphore(self._num_workers)
            self._loops[loop] = _LoopState(asyncio.Semaphore(self._max_pending), free)
        return self._loops[loop]

    def _drop_inherited(self) -> None:
        workers = self._workers()
        for worker in workers:
            worker.release()
        for process in [*self._dying, *(worker.process for worker in workers)]:
            process.returncode = 0  # not our child: keeps Popen from waiting for it
        self._forget()

    def _workers(self) -> list[_Worker]:
        return [*self._idle, *(worker for state in self._loops.values() for worker in state.busy)]

    def _kill(self, worker: _Worker) -> None:
        if not worker.killed:
            worker.kill()
            self._dying.append(worker.process)

    def _kill_all(self) -> None:
        self._num_closes += 1
        for worker in self._workers():
            self._kill(worker)  # whoever waits for a busy one reads its end, and releases it
        while self._idle:
            self._idle.pop().release()

    async def close(self) -> None:
        """Kills the workers and waits until they are gone; checks in flight fail, later ones start new workers."""
        if self._pid != os.getpid():
            self._drop_inherited()
        self._kill_all()
        while self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._dying.pop().wait, 5)

    def close_now(self) -> None:
        """Same as `close` without an event loop, for the end of the process."""
        if self._pid != os.getpid():
            return
        self._kill_all()
        while self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._dying.pop().wait(5)


def _worker_environment() -> dict[str, str]:
    """Lets the worker import this very package, also from a checkout that is not installed."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if _PACKAGE_ROOT.name not in ("site-packages", "dist-packages"):
        paths.append(str(_PACKAGE_ROOT))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONHASHSEED": "0"}


class _Worker:
    """One process and the parent's end of its socket."""

    def __init__(self, command: list[str]) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=_worker_environment(),
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.socket.setblocking(False)
        self.ready = False
        self.killed = False
        self.num_tasks = 0
        self._cpu_s_at_rest = 0.0
        self._received = bytearray()

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the worker's first word."""
        try:
            reply = await self._receive(math.inf, timeout_s)
        except _Lost as error:
            raise _Lost(f"a worker did not start: {self._last_words() or error}") from error
        if reply.get("ready") is not True:
            raise _Lost(f"a worker did not start: it sent {str(reply)[:200]}")
        self.ready = True
        self.close_errors()

    async def exchange(self, request: dict[str, Any], cpu_limit_s: float, wall_limit_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.num_tasks += 1
        body = json.dumps({**request, "id": self.num_tasks}).encode()
        try:
            sent = self.socket.send(struct.pack(">I", len(body)) + body)
        except OSError as error:
            raise _Lost(f"a worker was gone: {error}") from error
        if sent != len(body) + 4:
            raise _Lost("a worker did not take the whole request")
        reply = await self._receive(cpu_limit_s, wall_limit_s)
        if reply.get("id") != self.num_tasks:
            raise _Lost(f"a worker answered out of turn: {str(reply)[:200]}")
        return reply

    async def _receive(self, cpu_limit_s: float, wall_limit_s: float) -> dict[str, Any]:
        """Waits for one frame. The reader is removed by hand, in step: a late removal would hit a reused descriptor."""
        loop = asyncio.get_running_loop()
        frame: asyncio.Future[bytes | None] = loop.create_future()
        descriptor = self.socket.fileno()
        loop.add_reader(descriptor, self._on_readable, frame)
        try:
            await self._wait(frame, cpu_limit_s, wall_limit_s)
        finally:
            loop.remove_reader(descriptor)
        reply = self._decode(frame.result())
        cpu_s = reply.get("cpu_s")
        self._cpu_s_at_rest = cpu_s if isinstance(cpu_s, float) else self._cpu_s_at_rest
        return reply

    async def _wait(self, frame: asyncio.Future[bytes | None], cpu_limit_s: float, wall_limit_s: float) -> None:
        """Until the frame is there. Where nobody can tell how much the worker computed, it counts as lost."""
        deadline = time.monotonic() + wall_limit_s
        pause_s = cpu_limit_s + _CPU_GRACE_S  # it cannot have computed longer than that before
        while True:
            await asyncio.wait({frame}, timeout=min(pause_s, max(0.0, deadline - time.monotonic())))
            if frame.done():
                return
            late = time.monotonic() >= deadline
            total_s = process_cpu_s(self.process.pid)
            used_s = 0.0 if total_s is None else total_s - self._cpu_s_at_rest
            if used_s >= cpu_limit_s + (0.0 if late else _CPU_GRACE_S):
                raise WorkerTimeout(f"the check took more than {cpu_limit_s:g} s of CPU time")
            if late:
                raise _Lost(f"a worker was lost: no reply within {wall_limit_s:g} s, {used_s:.1f} s of them computing")
            pause_s = _POLL_S

    def _on_readable(self, frame: asyncio.Future[bytes | None]) -> None:
        if frame.done():
            return
        try:
            data = self.socket.recv(65536)
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
            raise _Lost(f"a worker sent garbage: {received!r}" if received else "a worker died during the check")
        try:
            reply = json.loads(body)
        except ValueError as error:
            raise _Lost(f"a worker sent garbage: {body[:200]!r}") from error
        if not isinstance(reply, dict):
            raise _Lost(f"a worker sent garbage: {body[:200]!r}")
        return reply

    def _last_words(self) -> str:
        """The end of what a worker that could not start wrote to its standard error."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        words = self.process.stderr.read() or b""
        return words.decode(errors="replace").strip()[-500:]

    def kill(self) -> None:
        """Kills the process, which wakes whoever waits for its reply; does not wait for its end."""
        self.killed = True
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes the parent's descriptors; only for a worker that nobody waits for."""
        self.socket.close()
        self.close_errors()

    def close_errors(self) -> None:
        """Closes the parent's end of the worker's standard error."""
        if self.process.stderr is not None:
            self.process.stderr.close()
