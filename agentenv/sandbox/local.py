"""Programs on this machine, each in a confined process forked from a warm interpreter.

    async with LocalSandbox() as sandbox:
        result = await sandbox.run("print(6 * 7)")

The level of isolation is found by trying, strongest first; where not even `min_isolation` can be had, nothing runs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, Literal, Self

from agentenv.errors import ConfigError
from agentenv.outside import outside
from agentenv.sandbox import _levels, files
from agentenv.sandbox._client import ZygoteLost
from agentenv.sandbox._execution import LocalExecution, Program
from agentenv.sandbox._pool import Pool
from agentenv.sandbox.queue import FairQueue
from agentenv.sandbox.session import Session
from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Policy, Status

MAX_ATTEMPTS = 3
"""Of an execution of which nothing is known, because the sandbox failed."""
MAX_OVERLOADED = 2
"""Of one that the host kept from running."""
MAX_TALKING = 256
"""Executions by `start` that are there at a time: most wait most of the time, so they do not take run slots."""
PROGRAMS_PER_ZYGOTE = 8
MAX_LIMIT = 1e6
"""Of any limit of an execution."""
MIN_MEMORY_MB = 16
"""What an interpreter has itself: a limit below could not hold."""
_DESCRIPTORS = 6
"""Of this process, for each program that is talked to: 4, and 2 for the moment in which it starts."""
_KEPT = ("stdout_kb", "stderr_kb", "channel_kb", "fetch_mb")


class LocalSandbox:
    """The sandbox of this machine. Used from one event loop; one per process is enough."""

    backend = "local"

    def __init__(
        self,
        *,
        min_isolation: Isolation = Isolation.LANDLOCK,
        isolation: Isolation | None = None,
        limits: ExecLimits | None = None,
        preimport: Sequence[str] = (),
        run_slots: int | None = None,
        max_waiting: int = 10_000,
        allow_unsafe: bool = False,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Nothing is started before the first execution, or `open`.

        Args:
            min_isolation: refuse to run with less.
            isolation: this level and no other; the strongest that works when None.
            limits: of executions that name none.
            preimport: packages of this environment that programs may import, and find imported already.
            run_slots: executions at a time; as many as there are cores when None.
            max_waiting: executions in the queue before `run` raises SandboxBusy.
            allow_unsafe: with AGENTENV_ALLOW_UNSAFE_SANDBOX=1 in the environment, run without isolation where none
                can be had, and say so on every result.
            waiting: entered while a caller waits for a slot, in the caller's context: to stop a clock of theirs.

        Raises:
            ConfigError: there is no such isolation.
        """
        self.isolation = Isolation.NONE
        self.layers: tuple[str, ...] = ()
        self.limits = limits or ExecLimits()
        self.run_slots = run_slots or len(os.sched_getaffinity(0))
        self._wanted = _levels.Wanted(
            min_isolation=_isolation("min_isolation", min_isolation),
            exactly=None if isolation is None else _isolation("isolation", isolation),
            preimport=tuple(preimport),
            allow_unsafe=allow_unsafe,
        )
        self._queue = FairQueue(self.run_slots, max_waiting=max_waiting, waiting=waiting)
        self._talking = FairQueue(_most_talking(), max_waiting=max_waiting, waiting=waiting)
        self._pool: Pool | None = None
        self._opening: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._live: set[LocalExecution] = set()

    # --- opening and closing ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the level, start the zygotes and check that they hold; `run` does it if need be.

        Raises:
            SandboxUnavailable: no isolation of the strength that is asked for can be had here.
            ConfigError: it belongs to another event loop.
        """
        await self._opened()

    async def _opened(self) -> Pool:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._pool is not None:
                raise ConfigError(
                    "LocalSandbox: expected the event loop that it was opened in, got another. Make one per loop"
                )
            self._loop, self._opening = loop, asyncio.Lock()
        if self._pool is None:
            assert self._opening is not None
            async with self._opening:
                if self._pool is None:
                    with outside():
                        level = await _levels.choose(self._wanted)
                    self.isolation, self.layers = level.isolation, level.layers
                    pool = Pool(level.plan, size=-(-self.run_slots // PROGRAMS_PER_ZYGOTE))
                    pool.adopt(level.zygote)
                    self._pool = pool
        return self._pool

    async def aclose(self) -> None:
        """End everything; again is harmless, and it may be opened again."""
        if self._opening is None:
            return
        async with self._opening:  # one that is being opened is closed as well
            pool, self._pool = self._pool, None
            if pool is not None:
                await pool.close()
        for execution in list(self._live):
            execution.close_streams()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()

    # --- executing -------------------------------------------------------------------------------------------------

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
        channel: bool = False,
    ) -> ExecResult:
        """Execute a program and wait for its end: see `Sandbox.run`; with `channel` it may write to descriptor 3."""
        job = self._program(
            program, files=files, policy=policy, limits=limits, channel="collect" if channel else "", fetch=fetch
        )
        job = replace(job, stdin=stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else bytes(stdin))
        pool = await self._opened()
        if not has_room(files or {}, job.limits):
            return self._refused(job.limits)
        asked = time.monotonic()
        queue_s = 0.0
        overloaded = 0
        for attempt in itertools.count(1):
            await self._queue.acquire(tenant)
            try:
                queue_s = queue_s or time.monotonic() - asked
                result = await self._execute(job, pool)
            finally:
                self._queue.release()
            if result.status is not Status.INFRA:
                break
            overloaded += bool(result.detail and result.detail.startswith("host:"))
            if pool.closed or attempt >= MAX_ATTEMPTS or overloaded >= MAX_OVERLOADED:
                break
            await asyncio.sleep(0.05 * attempt)
        return replace(result, queue_s=queue_s, attempts=attempt, layers=self.layers)

    def _refused(self, limits: ExecLimits) -> ExecResult:
        """The result where a program's files do not fit: as if it had written them itself."""
        detail = f"its files take more than {limits.disk_mb} MiB or {limits.num_inodes} entries"
        return ExecResult(
            Status.DISK_LIMIT, isolation=self.isolation, layers=self.layers, backend=self.backend, detail=detail
        )

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
    ) -> LocalExecution:
        """Execute a program that is talked to over its descriptor 3: see `Sandbox.start`.

        These take no run slot: who starts many that compute at a time is to hold a semaphore of `run_slots`.

        Raises:
            InfraError: it could not be started, three times.
            ConfigError: as `run`; and its files do not fit into its folder.
        """
        job = self._program(program, files=files, policy=policy, limits=limits, channel="talk")
        if not has_room(files or {}, job.limits):
            raise ConfigError(f"files: expected what fits, got {self._refused(job.limits).detail}. Raise the limits")
        pool = await self._opened()
        await self._talking.acquire(tenant)
        try:
            execution = await self._launch_retrying(job, pool)
        except BaseException:
            self._talking.release()
            raise
        execution.ended.add_done_callback(lambda _: self._talking.release())
        return execution

    async def _launch_retrying(self, job: Program, pool: Pool) -> LocalExecution:
        for attempt in itertools.count(1):
            try:
                return await self._launch(job, pool)
            except (ZygoteLost, OSError) as error:
                if attempt >= MAX_ATTEMPTS or pool.closed:
                    raise ZygoteLost(f"sandbox: expected a program to start, got {error}. Try again") from error
                await asyncio.sleep(0.05 * attempt)
        raise AssertionError

    def session(
        self, *, limits: ExecLimits | None = None, idle_s: float = 600.0, max_s: float = 3600.0, tenant: str = ""
    ) -> Session:
        """An interpreter that stays between turns, for `async with`: see `Session`."""
        return Session(self, limits=limits or self.limits, idle_s=idle_s, max_s=max_s, tenant=tenant)

    def turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Hold a run slot, in turn with executions: for work that an execution by `start` is about to do."""
        return self._queue.slot(tenant)

    async def _execute(self, job: Program, pool: Pool) -> ExecResult:
        with outside():
            try:
                execution = await self._launch(job, pool)
            except (ZygoteLost, OSError) as error:
                detail = f"sandbox: {error}"
                return ExecResult(Status.INFRA, isolation=self.isolation, backend=self.backend, detail=detail)
            try:
                return await execution.finish()
            except asyncio.CancelledError:
                await execution.kill()
                raise

    async def _launch(self, job: Program, pool: Pool) -> LocalExecution:
        execution = LocalExecution(job, self.isolation, self.layers)
        await execution.launch(await pool.acquire(), next(self._numbers))
        self._live.add(execution)
        execution.ended.add_done_callback(lambda _: self._live.discard(execution))
        return execution

    def _program(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None,
        policy: Policy,
        limits: ExecLimits | None,
        channel: Literal["", "collect", "talk"],
        fetch: Sequence[str] = (),
    ) -> Program:
        argv, source = check_program(program, policy)
        check_limits(limits or self.limits)
        given = files or {}
        check_files(given, fetch)
        header = {
            "argv": argv,
            "files": [(name, len(content)) for name, content in given.items()],
            "fetch": list(fetch),
        }
        contents = tuple(bytes(content) for content in given.values())
        return Program(header, source, contents, b"", policy, limits or self.limits, channel)


def _isolation(name: str, value: Isolation) -> Isolation:
    try:
        return Isolation(value)
    except ValueError:
        known = ", ".join(Isolation)
        raise ConfigError(f"LocalSandbox.{name}: expected one of {known}, got {value!r}. Choose one") from None


def check_program(program: str | Sequence[str], policy: str) -> tuple[list[str] | None, bytes]:
    """Tell an argv from Python source.

    Raises:
        ConfigError: it is neither, or an argv without policy `proc`.
    """
    if policy not in ("pure", "proc"):
        raise ConfigError(f"policy: expected 'pure' or 'proc', got {policy!r}. Commands need 'proc'")
    if isinstance(program, str):
        return None, program.encode("utf-8", "surrogatepass")
    argv = list(program)
    if not argv or not all(isinstance(part, str) and "\0" not in part for part in argv):
        raise ConfigError(f"program: expected Python source or a list of words, got {program!r}. Name a command")
    if policy != "proc":
        raise ConfigError(f"policy: expected 'proc' for the command {argv[0]!r}, got {policy!r}. Say policy='proc'")
    return argv, b""


def _most_talking() -> int:
    """MAX_TALKING, or what the file descriptors of this process are enough for."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_TALKING if soft == resource.RLIM_INFINITY else max(2, min(MAX_TALKING, (soft - 128) // _DESCRIPTORS))


def check_limits(limits: ExecLimits) -> None:
    """Refuse what no limit can be: 0 would be none at all to a file system.

    Raises:
        ConfigError: one is not above 0, or beyond MAX_LIMIT; what is kept of outputs may be 0; memory is less than
            MIN_MEMORY_MB.
    """
    for field in fields(limits):
        value = getattr(limits, field.name)
        least = 0 if field.name in _KEPT else 1 if field.name.startswith("num_") else 1e-6
        least = MIN_MEMORY_MB if field.name == "memory_mb" else least
        if not isinstance(value, int | float) or not least <= value <= MAX_LIMIT:
            raise ConfigError(
                f"limits.{field.name}: expected a number from {least:g} to {MAX_LIMIT:g}, got {value!r}. Change it"
            )


def has_room(given: Mapping[str, bytes], limits: ExecLimits) -> bool:
    """Whether the files of a program fit into its folder."""
    return files.fits(given, max_bytes=int(limits.disk_mb * (1 << 20)), max_inodes=int(limits.num_inodes))


def check_files(given: Mapping[str, bytes], fetch: Sequence[str]) -> None:
    """Refuse names and contents that cannot be.

    Raises:
        ConfigError: a name is not a plain relative one, or a content is no bytes.
    """
    files.check_names(given, "files")
    files.check_fetch(fetch)
    for name, content in given.items():
        if not isinstance(content, bytes | bytearray | memoryview):
            raise ConfigError(f"files[{name!r}]: expected bytes, got {type(content).__name__}. Encode it")
