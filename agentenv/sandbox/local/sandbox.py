"""Programs on this machine, each in a confined process forked from a warm interpreter.

    async with LocalSandbox() as sandbox:
        result = await sandbox.run("print(6 * 7)")

The levels of isolation are tested, strongest first. Without at least `min_isolation` no program runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import fields, replace
from typing import Any, Literal, Self

from agentenv._util.virtual_time import external_work
from agentenv.errors import ConfigError
from agentenv.sandbox.guest import files
from agentenv.sandbox.local import levels
from agentenv.sandbox.local.execution import CROWDED, LocalExecution, Program
from agentenv.sandbox.local.plan import missing_memory
from agentenv.sandbox.local.queue import FairQueue
from agentenv.sandbox.local.session import InterpreterSession
from agentenv.sandbox.local.zygote_client import ZygoteLost, ZygotePool
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

MAX_ATTEMPTS = 3
"""Attempts at an execution when the sandbox fails."""
MAX_INTERACTIVE = 256
"""Concurrent executions by `start`. They are idle most of the time, so they take no run slots."""
PROGRAMS_PER_ZYGOTE = 8
MAX_LIMIT = 1e6
"""Largest value of any limit of an execution."""
MIN_MEMORY_MB = 16
"""Smallest memory limit: an interpreter needs this much itself."""
_LOG = logging.getLogger(__name__)
_DESCRIPTORS = 6
"""File descriptors of this process for each interactive program: 4, and 2 more while it starts."""
_CAPTURE_LIMITS = ("stdout_kb", "stderr_kb", "channel_kb", "fetch_mb")


class LocalSandbox:
    """The sandbox of this machine. For use from one event loop; one per process is enough."""

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
    ) -> None:
        """Configure a sandbox; `open` or the first execution starts it.

        Args:
            min_isolation: weakest acceptable isolation.
            isolation: the only acceptable level; the strongest that works if None.
            limits: default limits of executions.
            preimport: packages of this environment that are imported in advance. Programs see them and what they
                require, and no other package.
            run_slots: number of concurrent executions; the number of cores if None.
            max_waiting: number of waiting executions from which `run` raises SandboxBusy.
            allow_unsafe: if AGENTENV_ALLOW_UNSAFE_SANDBOX=1 is also set in the environment, run without isolation when
                none is available; every result reports this.

        Raises:
            ConfigError: the isolation is unknown.
        """
        self.isolation = Isolation.NONE
        self.layers: tuple[str, ...] = ()
        self.limits = limits or ExecLimits()
        self.run_slots = run_slots or len(os.sched_getaffinity(0))
        self._request = levels.IsolationRequest(
            min_isolation=_parse_isolation("min_isolation", min_isolation),
            exactly=None if isolation is None else _parse_isolation("isolation", isolation),
            preimport=tuple(preimport),
            allow_unsafe=allow_unsafe,
        )
        self._queue = FairQueue(self.run_slots, max_waiting=max_waiting)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MAX_INTERACTIVE if soft == resource.RLIM_INFINITY else (soft - 128) // _DESCRIPTORS
        self._interactive = FairQueue(max(2, min(MAX_INTERACTIVE, most)), max_waiting=max_waiting)
        self._pool: ZygotePool | None = None
        self._opening: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._live: set[LocalExecution] = set()

    # --- opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Choose the level, start the zygotes and check them; `run` does this if necessary.

        Raises:
            SandboxUnavailable: the required isolation is not available here.
            ConfigError: the sandbox belongs to another event loop.
        """
        await self._open_pool()

    async def _open_pool(self) -> ZygotePool:
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
                    with external_work():
                        level = await levels.choose(self._request)
                    self.isolation, self.layers = level.zygote.plan.isolation, level.layers
                    if missing := missing_memory(self.limits.memory_mb, self.run_slots):
                        _LOG.warning("LocalSandbox: %s", missing)
                    self._pool = ZygotePool(level.zygote, size=-(-self.run_slots // PROGRAMS_PER_ZYGOTE))
        return self._pool

    async def aclose(self) -> None:
        """End all programs and zygotes. Repeated calls have no effect; the sandbox may be opened again."""
        if self._opening is None:
            return
        async with self._opening:  # a concurrent `open` finishes first
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

    # --- executing ---------------------------------------------------------------------------------------------------

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        channel: bool = False,
    ) -> ExecResult:
        """Execute a program and wait for its end, as `Sandbox.run` describes."""
        job = self._program(
            program, files=files, policy=policy, limits=limits, channel="collect" if channel else "", fetch=fetch
        )
        job = replace(job, stdin=stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else bytes(stdin))
        pool = await self._open_pool()
        if not has_room(files or {}, job.limits):  # as if the program had written them itself
            return self._not_run(ExecStatus.DISK_LIMIT, _no_room(job.limits))
        alone = False
        for attempt in itertools.count(1):
            async with self._queue.slot(alone=alone):
                result = await self._execute(job, pool)
            by_host = bool(result.detail and result.detail.startswith("host:"))
            is_known = not by_host and result.status is not ExecStatus.INFRA
            if is_known or pool.closed or attempt >= MAX_ATTEMPTS or (by_host and alone):
                break
            alone |= by_host  # without others, whose programs may have taken what the host has
            await asyncio.sleep(0.05 * attempt)
        if alone and result.detail == CROWDED:  # it had no neighbors, or some that take no turn
            result = replace(result, detail=None)
        return replace(result, attempts=attempt, layers=self.layers)

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
    ) -> LocalExecution:
        """Start an interactive program, as `Sandbox.start` describes.

        It takes no run slot. A caller that starts many programs that compute must limit them, for example by `turn`.

        Raises:
            InfraError: the program could not be started in three attempts.
            ConfigError: an argument is invalid, or the files do not fit into the working folder.
        """
        job = self._program(program, files=files, policy=policy, limits=limits, channel="interactive")
        if not has_room(files or {}, job.limits):
            raise ConfigError(f"files: expected files that fit, got {_no_room(job.limits)}. Raise the limits")
        pool = await self._open_pool()
        await self._interactive.acquire()
        try:
            for attempt in itertools.count(1):
                try:
                    execution = await self._launch(job, pool)
                    break
                except (ZygoteLost, OSError) as error:
                    if attempt >= MAX_ATTEMPTS or pool.closed:
                        raise ZygoteLost(f"sandbox: expected a program to start, got {error}. Try again") from error
                    await asyncio.sleep(0.05 * attempt)
        except BaseException:
            self._interactive.release()
            raise
        execution.ended.add_done_callback(lambda _: self._interactive.release())
        return execution

    def session(
        self, *, limits: ExecLimits | None = None, idle_s: float = 600.0, max_s: float = 3600.0
    ) -> InterpreterSession:
        """Return an interpreter that keeps its state between turns, for `async with`; see `InterpreterSession`."""
        return InterpreterSession(self, limits=limits or self.limits, idle_s=idle_s, max_s=max_s)

    def turn(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]:
        """Hold a run slot, or all, for the duration of the block, for work of a program started by `start`."""
        return self._queue.slot(alone=alone)

    async def _execute(self, job: Program, pool: ZygotePool) -> ExecResult:
        with external_work():
            try:
                execution = await self._launch(job, pool)
            except (ZygoteLost, OSError) as error:
                return self._not_run(ExecStatus.INFRA, f"sandbox: {error}")
            try:
                return await execution.finish()
            except asyncio.CancelledError:
                await execution.kill()
                raise

    def _not_run(self, status: ExecStatus, detail: str) -> ExecResult:
        return ExecResult(status, isolation=self.isolation, layers=self.layers, detail=detail)

    async def _launch(self, job: Program, pool: ZygotePool) -> LocalExecution:
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
        channel: Literal["", "collect", "interactive"],
        fetch: Sequence[str] = (),
    ) -> Program:
        argv, source = check_program(program, policy)
        check_limits(limits or self.limits)
        files = files or {}
        check_files(files, fetch)
        header = {"argv": argv, "files": [(name, len(content)) for name, content in files.items()]}
        contents = tuple(bytes(content) for content in files.values())
        return Program(header, tuple(fetch), source, contents, b"", policy, limits or self.limits, channel)


def _parse_isolation(name: str, value: Isolation) -> Isolation:
    try:
        return Isolation(value)
    except ValueError:
        raise ConfigError(
            f"LocalSandbox.{name}: expected one of {', '.join(Isolation)}, got {value!r}. Choose one"
        ) from None


def check_program(program: str | Sequence[str], policy: str) -> tuple[list[str] | None, bytes]:
    """Return the argv of a command, or None and the encoded Python source.

    Raises:
        ConfigError: the program is neither, or a command without policy `proc`.
    """
    if policy not in ("pure", "proc"):
        raise ConfigError(f"policy: expected 'pure' or 'proc', got {policy!r}. Commands need 'proc'")
    if isinstance(program, str):
        return None, program.encode("utf-8", "surrogatepass")
    argv = list(program)
    if not argv or not all(isinstance(part, str) and "\0" not in part for part in argv):
        raise ConfigError(f"program: expected Python source or a list of words, got {program!r}. Name a command")
    if policy != "proc":
        raise ConfigError(f"policy: expected 'proc' for the command {argv[0]!r}, got {policy!r}. Set policy='proc'")
    return argv, b""


def check_limits(limits: ExecLimits) -> None:
    """Check that each limit is in its range. The kept size of an output may be 0.

    Raises:
        ConfigError: a limit is not above 0 (which a file system takes for unlimited), or above MAX_LIMIT, or the memory
            is below MIN_MEMORY_MB.
    """
    for field in fields(limits):
        value = getattr(limits, field.name)
        least = 0 if field.name in _CAPTURE_LIMITS else 1 if field.name.startswith("num_") else 1e-6
        least = MIN_MEMORY_MB if field.name == "memory_mb" else least
        if not isinstance(value, int | float) or not least <= value <= MAX_LIMIT:
            raise ConfigError(f"limits.{field.name}: expected a number from {least:g} to {MAX_LIMIT:g}, got {value!r}.")


def has_room(contents: Mapping[str, bytes], limits: ExecLimits) -> bool:
    """Return True if the files of a program fit into its working folder."""
    return files.fits(contents, max_bytes=int(limits.disk_mb * (1 << 20)), max_inodes=int(limits.num_inodes))


def _no_room(limits: ExecLimits) -> str:
    return f"files that take more than {limits.disk_mb} MiB or {limits.num_inodes} entries"


def check_files(contents: Mapping[str, bytes], fetch: Sequence[str]) -> None:
    """Check the names and contents of files, and the names to fetch.

    Raises:
        ConfigError: a name is not a plain relative path, or a content is not bytes.
    """
    files.check_names(contents, "files")
    files.check_fetch(fetch)
    for name, content in contents.items():
        if not isinstance(content, bytes | bytearray | memoryview):
            raise ConfigError(f"files[{name!r}]: expected bytes, got {type(content).__name__}. Encode it")
