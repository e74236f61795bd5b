"""Run graders of untrusted text in worker processes that can be killed, one request at a time each, with limits.

There are two limits, because a machine may be busy. A request that *computes* too long is at fault (`WorkerTimeout`); a
worker that does not answer although it hardly computed is lost and replaced, like one that died (`WorkerFailed`). Both
limits start when a worker takes the request: neither waiting for a free worker nor loading a handler counts.

A request names its `task`, and `main.py` maps it to a handler. The worker speaks length-prefixed JSON over a socket
pair (its standard input and output), with plain sockets, not asyncio transports, so that it outlives an event loop and
serves the next one.

Example:
    >>> await shared_pool().run({"task": "math", "answer": "1/2", "golds": ["0.5"]}, cpu_limit_s=2.0)
    {'status': 'ok', 'correct': True, 'detail': ''}
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any

from agentenv._util.calls import waiting
from agentenv._util.virtual_time import external_work
from agentenv.errors import ConfigError
from agentenv.rewards.workers.process import Lost, Worker, WorkerFailed, WorkerLimits, WorkerTimeout, encode

__all__ = ["WorkerFailed", "WorkerPool", "WorkerTimeout", "shared_pool"]

MEMORY_LIMIT_BYTES = 4 << 30
"""Default limit on the address space of a request."""
_WORKER_MODULE = "agentenv.rewards.workers.main"
_WALL_PER_CPU = 10.0
_MIN_WALL_S = 30.0
_MAX_ATTEMPTS = 2
_MOST_SHARED_WORKERS = 16


@dataclass(slots=True)
class _LoopState:
    """State of one event loop."""

    admitted: asyncio.Semaphore
    free: asyncio.Semaphore
    busy: set[Worker] = field(default_factory=set)


class WorkerPool:
    """A pool of worker processes that start on demand; each event loop gets up to `num_workers`.

    A request may compute for `cpu_limit_s`. A worker that exceeds that is killed about a second of computing later. In
    any case it is killed `wall_limit_s` after it took the request; the default is ten times `cpu_limit_s`, at least
    30 s. Beyond `max_pending` requests, callers wait in line. A worker is replaced after `max_tasks_per_worker`
    requests.

    Raises:
        ConfigError: an argument is not a number above zero.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        cpu_limit_s: float = 2.0,
        wall_limit_s: float | None = None,
        max_pending: int = 1024,
        max_tasks_per_worker: int = 2000,
    ) -> None:
        limits = {"cpu_limit_s": cpu_limit_s, "wall_limit_s": 1.0 if wall_limit_s is None else wall_limit_s}
        whole = {"num_workers": num_workers, "max_pending": max_pending, "max_tasks_per_worker": max_tasks_per_worker}
        for name, value in {**limits, **whole}.items():
            kinds: tuple[type, ...] = (int,) if name in whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                raise ConfigError(f"WorkerPool.{name}: expected a number above 0, got {value!r}. Change it.")
        self._num_workers = num_workers
        self._cpu_limit_s = cpu_limit_s
        self._wall_limit_s = wall_limit_s
        self._max_pending = max_pending
        self._max_tasks = max_tasks_per_worker
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()  # guards the containers below: event loops of several threads share them
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}
        self._idle: list[Worker] = []
        self._dying: list[subprocess.Popen[bytes]] = []
        self._num_closes = 0

    async def run(
        self,
        request: dict[str, Any],
        *,
        cpu_limit_s: float | None = None,
        wall_limit_s: float | None = None,
        memory_limit_bytes: int | None = MEMORY_LIMIT_BYTES,
    ) -> dict[str, Any]:
        """Return the result of the handler of `request["task"]`; waiting for a free worker counts toward no limit.

        Request and result are plain JSON. `cpu_limit_s` and `wall_limit_s` default to the pool's, and without either
        `wall_limit_s` follows from `cpu_limit_s`. `memory_limit_bytes` None sets no limit.

        Raises:
            WorkerTimeout: the request exceeded its CPU time or memory.
            WorkerFailed: the request lost two workers, none could start, the handler could not be loaded or raised, or
                the pool was closed meanwhile.
            DataError: the handler reports that the row cannot be graded, or the request is not JSON.
        """
        cpu_s = cpu_limit_s or self._cpu_limit_s
        wall_s = wall_limit_s or self._wall_limit_s or max(_WALL_PER_CPU * cpu_s, _MIN_WALL_S)
        limits = WorkerLimits(cpu_s, wall_s, memory_limit_bytes)
        body = encode(request)
        if self._pid != os.getpid():  # forked: the workers are the parent's
            self._drop_inherited()
        loop = asyncio.get_running_loop()
        with self._lock:
            ended = [self._loops.pop(each) for each in list(self._loops) if each.is_closed()]
            self._dying = [process for process in self._dying if process.poll() is None]
            if loop not in self._loops:
                free = asyncio.Semaphore(self._num_workers)
                self._loops[loop] = _LoopState(asyncio.Semaphore(self._max_pending), free)
            state = self._loops[loop]
        for worker in [worker for one in ended for worker in one.busy]:
            self._kill(worker)
            worker.release()
        num_closes = self._num_closes
        async with contextlib.AsyncExitStack() as slots:
            with waiting():
                await slots.enter_async_context(state.admitted)
                await slots.enter_async_context(state.free)
            for attempt in count(1):
                if self._num_closes != num_closes:
                    raise WorkerFailed("the grader was closed during the check")
                try:
                    with external_work():
                        return await self._run_once(state, request, body, limits)
                except Lost as error:
                    if attempt == _MAX_ATTEMPTS:
                        raise WorkerFailed(f"{error} ({attempt} attempts)") from error
        raise AssertionError("unreachable: count() has no end")

    async def _run_once(
        self, state: _LoopState, request: dict[str, Any], body: str, limits: WorkerLimits
    ) -> dict[str, Any]:
        key = (str(request.get("task")), str(request.get("function", "")))
        worker = self._take_idle(lambda worker: key in worker.loaded) or self._take_idle(lambda worker: True)
        if worker is None:
            worker = Worker([sys.executable, "-P", "-m", _WORKER_MODULE, str(self._pid)])
        state.busy.add(worker)
        try:
            return await worker.run(key, body, limits)
        finally:  # a cancelled request leaves its worker in the middle of it, so that worker goes
            with self._lock:
                state.busy.discard(worker)
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
        return [*self._idle, *(worker for state in self._loops.values() for worker in state.busy)]

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
