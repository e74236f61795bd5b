"""Run graders of untrusted text in worker processes that can be killed, one request at a time each, with limits.

There are two limits, because a machine may be busy. A request that *computes* too long is at fault (`WorkerTimeout`); a
worker that does not answer although it hardly computed is lost and replaced, like one that died (`WorkerFailed`). Both
limits start when a worker takes the request: neither waiting for a free worker nor loading a handler counts.

A request names its `task`, and `main.py` maps it to a handler. Each process has a thread here, which speaks
length-prefixed JSON with it over a socket pair (its standard input and output), so that it serves any event loop.

Example:
    >>> await shared_pool().run({"task": "math", "answer": "1/2", "golds": ["0.5"]}, cpu_limit_s=2.0)
    {'status': 'ok', 'correct': True, 'detail': ''}
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from agentenv._util.calls import waiting
from agentenv._util.virtual_time import external_work
from agentenv.errors import ConfigError
from agentenv.rewards.workers.process import Key, Lost, Worker, WorkerFailed, WorkerLimits, WorkerTimeout, encode

__all__ = ["WorkerFailed", "WorkerPool", "WorkerTimeout", "shared_pool"]

MEMORY_LIMIT_BYTES = 4 << 30
"""Default limit on the address space of a request."""
_WORKER_MODULE = "agentenv.rewards.workers.main"
_WALL_PER_CPU = 10.0
_MIN_WALL_S = 30.0
_MAX_ATTEMPTS = 2
_MOST_SHARED_WORKERS = 16
_JOIN_S = 5.0


class _Job:
    """One request on its way from an event loop to a worker."""

    def __init__(self, key: Key, body: str, limits: WorkerLimits) -> None:
        self.key, self.body, self.limits = key, body, limits
        self.started: Future[None] = Future()
        self.answer: Future[dict[str, Any]] = Future()


class _WorkerThread(Thread):
    """The thread of one worker process, which it starts, replaces and ends; the pool's lock guards `job`."""

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__(name="agentenv-worker", daemon=True)
        self.pool = pool
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.job: _Job | None = None
        self.worker: Worker | None = None
        self.closed = False

    def run(self) -> None:
        """Serve jobs until `None`."""
        while (job := self.jobs.get()) is not None:
            answer, error = None, None
            try:
                answer = self._answered(job)
            except Exception as raised:  # noqa: BLE001 - carried to the caller
                error = raised
            self.pool.settle(self, job)
            if not job.answer.set_running_or_notify_cancel():
                continue
            if error is None:
                job.answer.set_result(answer or {})
            else:
                job.answer.set_exception(error)
        self._end_worker()

    def loaded(self, key: Key) -> bool:
        """Return True if the worker has this handler."""
        return self.worker is not None and key in self.worker.loaded

    def _answered(self, job: _Job) -> dict[str, Any]:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                if self.worker is not None and self.worker.process.poll() is not None:
                    self._end_worker()
                if self.worker is None:
                    self.worker = Worker([sys.executable, "-P", "-m", _WORKER_MODULE, str(os.getpid())])
                if self.closed or job.answer.cancelled():  # meanwhile, when there was no worker to kill
                    raise Lost("its caller left")
                return self.worker.run(job.key, job.body, job.limits)
            except Lost as lost:
                if self.closed:
                    raise WorkerFailed("the grader was closed during the check") from lost
                if attempt == _MAX_ATTEMPTS or job.answer.cancelled():
                    raise WorkerFailed(f"{lost} ({attempt} attempts)") from lost
            finally:
                worker = self.worker
                if worker is not None and not (worker.at_rest and worker.num_tasks < self.pool.max_tasks):
                    self._end_worker()
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _end_worker(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.end()


class WorkerPool:
    """A pool of up to `num_workers` worker processes that start on demand, for all event loops of the process.

    A request may compute for `cpu_limit_s`. A worker that exceeds that and cannot be interrupted is killed one to two
    seconds of computing later. In any case it is killed `wall_limit_s` after it took the request; the default is ten
    times `cpu_limit_s`, at least 30 s. Further requests wait in line. A worker is replaced after `max_tasks_per_worker`
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
        max_tasks_per_worker: int = 2000,
    ) -> None:
        limits = {"cpu_limit_s": cpu_limit_s, "wall_limit_s": 1.0 if wall_limit_s is None else wall_limit_s}
        whole = {"num_workers": num_workers, "max_tasks_per_worker": max_tasks_per_worker}
        for name, value in {**limits, **whole}.items():
            kinds: tuple[type, ...] = (int,) if name in whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                raise ConfigError(f"WorkerPool.{name}: expected a number above 0, got {value!r}. Change it.")
        self.num_workers = num_workers
        self.max_tasks = max_tasks_per_worker
        self._cpu_limit_s = cpu_limit_s
        self._wall_limit_s = wall_limit_s
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()  # guards the containers below, and which job a thread has
        self._threads: list[_WorkerThread] = []
        self._idle: list[_WorkerThread] = []
        self._pending: deque[_Job] = deque()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [thread.worker.process.pid for thread in self._threads if thread.worker is not None]

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
        key = (str(request.get("task")), str(request.get("function", "")))
        job = _Job(key, encode(request), WorkerLimits(cpu_s, wall_s, memory_limit_bytes))
        if self._pid != os.getpid():  # forked: the workers are the parent's
            self._drop_inherited()
        with self._lock:
            self._submit(job)
        try:
            with external_work():
                with waiting():
                    await asyncio.wrap_future(job.started)
                return await asyncio.wrap_future(job.answer)
        finally:
            if not job.answer.done() or job.answer.cancelled():
                self._cancel(job)

    def _submit(self, job: _Job) -> None:
        """Hand a job to an idle worker, to one that has its handler if possible, or to a new one, or queue it."""
        thread = next(filter(lambda each: each.loaded(job.key), reversed(self._idle)), None)
        if thread is None and self._idle:
            thread = self._idle[-1]
        if thread is not None:
            self._idle.remove(thread)
        elif len(self._threads) < self.num_workers:
            thread = _WorkerThread(self)
            self._threads.append(thread)
            thread.start()
        else:
            self._pending.append(job)
            return
        self._start(job, thread)

    def _start(self, job: _Job, thread: _WorkerThread) -> None:
        thread.job = job
        job.started.set_result(None)
        thread.jobs.put(job)

    def settle(self, thread: _WorkerThread, job: _Job) -> None:
        """Give a thread whose job ended the next one."""
        with self._lock:
            thread.job = None
            if thread.closed:
                return
            while self._pending:
                if self._pending[0].started.set_running_or_notify_cancel():
                    self._start(self._pending.popleft(), thread)
                    return
                self._pending.popleft()
            self._idle.append(thread)

    def _cancel(self, job: _Job) -> None:
        """Kill the worker that still works for a caller that left."""
        job.started.cancel()
        job.answer.cancel()
        with self._lock:
            for thread in self._threads:
                if thread.job is job and thread.worker is not None:
                    thread.worker.kill()

    def _drop_inherited(self) -> None:
        for thread in self._threads:
            if thread.worker is not None:
                thread.worker.disown()
        self._reset()

    async def close(self) -> None:
        """Kill the workers and wait for their end; running checks fail, later ones start new workers."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Close without an event loop, at the end of the process."""
        if self._pid != os.getpid():
            self._drop_inherited()
        with self._lock:
            threads, self._threads, self._idle = self._threads, [], []
            pending, self._pending = self._pending, deque()
            for thread in threads:
                thread.closed = True
                thread.jobs.put(None)
                if thread.worker is not None:
                    thread.worker.kill()
        for job in pending:
            if job.started.set_running_or_notify_cancel():
                job.answer.set_exception(WorkerFailed("the grader was closed before the check"))
                job.started.set_result(None)
        for thread in threads:
            thread.join(_JOIN_S)


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
