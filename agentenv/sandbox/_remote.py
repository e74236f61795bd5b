"""The near side of a remote sandbox: executions and sessions on a far one, tried again where that is lost.

A backend says how its far side is reached: it gives a `Link`. What is lost on the way is INFRA, never a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox._remote_link import Link
from agentenv.sandbox._remote_session import RemoteSession
from agentenv.sandbox.local import check_files, check_program
from agentenv.sandbox.types import (
    ExecLimits,
    ExecResult,
    Isolation,
    Policy,
    SandboxBusy,
    Status,
)

MAX_ATTEMPTS = 3
"""Of an execution whose far side was lost."""
MAX_MIB = 128
"""Of a program with all that it is given."""
_BACKOFF_S = 0.2


class RemoteExecution:
    """A program that runs on the far side and is talked to; made by `RemoteSandbox.start`."""

    def __init__(self, link: Link, name: str, sandbox: RemoteSandbox) -> None:
        self._link = link
        self._name = name
        self._sandbox = sandbox
        self._reading: asyncio.Task[bytes] | None = None
        self._kept = b""
        self.ended = asyncio.ensure_future(self._wait())
        """Its result; never an exception."""

    async def _wait(self) -> ExecResult:
        try:
            result: ExecResult = await self._link.call("wait", name=self._name)
        except InfraError as error:
            result = ExecResult(Status.INFRA, detail=str(error))
        return self._sandbox.marked(result)

    async def send(self, data: bytes) -> None:
        """Give it bytes on its descriptor 3; harmless once it has ended."""
        with contextlib.suppress(InfraError):
            await self._link.call("send", name=self._name, data=bytes(data))

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Some of what it wrote to descriptor 3, `b""` once it has ended or closed its side.

        Cancelling this loses nothing of what was written.
        """
        if not self._kept:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read(max_bytes))
            self._kept = await asyncio.shield(self._reading)
            self._reading = None
        data, self._kept = self._kept[:max_bytes], self._kept[max_bytes:]
        return data

    async def _read(self, max_bytes: int) -> bytes:
        with contextlib.suppress(InfraError):
            data: bytes = await self._link.call("receive", name=self._name, max_bytes=max_bytes)
            return data
        return b""

    async def finish(self) -> ExecResult:
        """Wait until it has ended by itself or by its limits."""
        result = await asyncio.shield(self.ended)
        await self._drop("finish")
        return result

    async def kill(self) -> ExecResult:
        """End it now, and wait until it and all that it started are gone."""
        await self._drop("kill")
        return await asyncio.shield(self.ended)

    async def _drop(self, how: str) -> None:
        with contextlib.suppress(InfraError):
            await self._link.call(how, name=self._name)


class RemoteSandbox:
    """What all backends with a `Host` on their far side have in common. Used from one event loop."""

    backend = "remote"

    def __init__(self, *, limits: ExecLimits | None = None) -> None:
        """Nothing is started before the first execution, or `open`.

        Args:
            limits: of executions that name none.
        """
        self.isolation = Isolation.REMOTE
        self.layers: tuple[str, ...] = ()
        self.limits = limits or ExecLimits()
        self._closed = False
        self._live: set[RemoteExecution] = set()
        self.sessions: set[RemoteSession] = set()
        """Those that are open."""

    # --- what a backend gives ------------------------------------------------------------------------------------

    async def _acquire(self, tenant: str) -> Link:
        """A link for this tenant, opened if need be.

        Raises:
            SandboxUnavailable: it was never to be had.
            InfraError: it is not to be had just now.
        """
        raise NotImplementedError

    def _release(self, link: Link) -> None:
        """A link that was acquired is not used any more."""

    async def _shut(self) -> None:
        """End the far side."""

    def seen(self, isolation: Isolation) -> Isolation:
        """How a result's isolation is called from here: behind another wall, that is what counts."""
        return Isolation.REMOTE if isolation is not Isolation.NONE else isolation

    # --- opening and closing ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Reach the far side, and have it check that it holds; `run` does it if need be.

        Raises:
            SandboxUnavailable: it is not to be had.
            InfraError: it is not to be had just now.
        """
        async with self.borrowed(""):
            pass

    async def aclose(self) -> None:
        """End everything; again is harmless, and it may be opened again."""
        self._closed = True
        try:
            for execution in list(self._live):
                await execution.kill()
            for session in list(self.sessions):
                await session.aclose()
            await self._shut()
        finally:
            self._closed = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()

    @asynccontextmanager
    async def borrowed(self, tenant: str) -> AsyncIterator[Link]:
        """A link, for as long as the block runs."""
        link = await self._acquire(tenant)
        try:
            yield link
        finally:
            self._release(link)

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
        """Execute a program and wait for its end: see `Sandbox.run`."""
        given = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else bytes(stdin)
        job = self._job(program, files=files, fetch=fetch, policy=policy, limits=limits, size=len(given))
        job |= {"stdin": given, "fetch": list(fetch), "channel": channel, "tenant": tenant}
        for attempt in itertools.count(1):
            try:
                async with self.borrowed(tenant) as link:
                    result: ExecResult = await link.call("run", **job)
                break
            except SandboxBusy:
                raise
            except InfraError as error:
                result = ExecResult(Status.INFRA, detail=str(error))
            if attempt >= MAX_ATTEMPTS or self._closed:
                break
            await asyncio.sleep(_BACKOFF_S * attempt)
        return replace(self.marked(result), attempts=result.attempts + attempt - 1)

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
    ) -> RemoteExecution:
        """Execute a program that is talked to over its descriptor 3: see `Sandbox.start`.

        Raises:
            InfraError: it could not be started, three times.
            ConfigError: as `run`; and its files do not fit into its folder.
        """
        job = self._job(program, files=files, fetch=(), policy=policy, limits=limits, size=0) | {"tenant": tenant}
        for attempt in itertools.count(1):
            try:
                return await self._launch(job, tenant)
            except SandboxBusy:
                raise
            except InfraError:
                if attempt >= MAX_ATTEMPTS or self._closed:
                    raise
            await asyncio.sleep(_BACKOFF_S * attempt)
        raise AssertionError

    async def _launch(self, job: Mapping[str, Any], tenant: str) -> RemoteExecution:
        link, name = await self._acquire(tenant), uuid.uuid4().hex
        try:
            await link.call("start", name=name, **job)
        except BaseException:
            try:
                with contextlib.suppress(InfraError):
                    await link.call("kill", name=name)  # it may have started although we never heard
            finally:
                self._release(link)
            raise
        execution = RemoteExecution(link, name, self)
        self._live.add(execution)

        def forget(_: object) -> None:
            """It has ended."""
            self._live.discard(execution)
            self._release(link)

        execution.ended.add_done_callback(forget)
        return execution

    def session(
        self, *, limits: ExecLimits | None = None, idle_s: float = 600.0, max_s: float = 3600.0, tenant: str = ""
    ) -> RemoteSession:
        """An interpreter that stays between turns, for `async with`: see `Session`."""
        options = {"limits": limits or self.limits, "idle_s": idle_s, "max_s": max_s}
        return RemoteSession(self, tenant=tenant, options=options)

    def marked(self, result: ExecResult) -> ExecResult:
        """A result, with what stands around it."""
        infra = result.status is Status.INFRA and result.isolation is Isolation.NONE
        isolation = self.isolation if infra else self.seen(result.isolation)
        return replace(result, isolation=isolation, layers=self.layers, backend=self.backend)

    def _job(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None,
        fetch: Sequence[str],
        policy: Policy,
        limits: ExecLimits | None,
        size: int,
    ) -> dict[str, Any]:
        """Arguments of `run` and `start`, checked here: a wrong one is the caller's fault, and costs no round trip."""
        check_program(program, policy)
        given = {name: bytes(content) for name, content in (files or {}).items()} if files else {}
        check_files(files or {}, fetch)
        size += len(program) if isinstance(program, str) else 0
        size += sum(len(content) for content in given.values())
        if size > MAX_MIB << 20:
            raise ConfigError(f"sandbox: expected a program and files below {MAX_MIB} MiB, got {size} bytes. Give less")
        return {
            "program": program if isinstance(program, str) else list(program),
            "files": given,
            "policy": policy,
            "limits": limits or self.limits,
        }
