"""The base class of remote sandboxes: executions and sessions on a remote host, retried when the host is lost.

A backend implements how its host is reached: `_acquire` returns a `Link`. A lost host is INFRA, never a verdict.
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
from agentenv.sandbox.local.sandbox import check_files, check_program
from agentenv.sandbox.local.session import TurnResult
from agentenv.sandbox.remote.link import Link, retrieve_exception
from agentenv.sandbox.types import (
    ExecLimits,
    ExecResult,
    ExecStatus,
    Isolation,
    Policy,
    SandboxBusy,
)

MAX_ATTEMPTS = 3
"""Attempts at an execution whose host was lost."""
MAX_MIB = 128
"""Largest program with its input and files, in MiB."""
_BACKOFF_S = 0.2


class RemoteExecution:
    """An interactive program on the remote host; created by `RemoteSandbox.start`."""

    def __init__(self, link: Link, name: str, sandbox: RemoteSandbox) -> None:
        self._link = link
        self._name = name
        self._sandbox = sandbox
        self._reading: asyncio.Task[bytes] | None = None
        self._buffer = b""
        self.ended = asyncio.ensure_future(self._wait())
        """The result of the program; never an exception."""

    async def _wait(self) -> ExecResult:
        try:
            result: ExecResult = await self._link.call("wait", name=self._name)
        except InfraError as error:
            result = ExecResult(ExecStatus.INFRA, detail=str(error))
        return self._sandbox.annotate(result)

    async def send(self, data: bytes) -> None:
        """Send bytes to the program's descriptor 3; no effect once the program has ended."""
        with contextlib.suppress(InfraError):
            await self._link.call("send", name=self._name, data=bytes(data))

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return bytes that the program wrote to descriptor 3; `b""` once it has ended or closed its side.

        Cancelling this call loses no bytes.
        """
        if not self._buffer:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read(max_bytes))
            self._buffer = await asyncio.shield(self._reading)
            self._reading = None
        data, self._buffer = self._buffer[:max_bytes], self._buffer[max_bytes:]
        return data

    async def _read(self, max_bytes: int) -> bytes:
        with contextlib.suppress(InfraError):
            data: bytes = await self._link.call("receive", name=self._name, max_bytes=max_bytes)
            return data
        return b""

    async def finish(self) -> ExecResult:
        """Wait for the end of the program, by itself or by its limits."""
        result = await asyncio.shield(self.ended)
        await self._drop("finish")
        return result

    async def kill(self) -> ExecResult:
        """Kill the program and wait until it and its processes are gone."""
        await self._drop("kill")
        return await asyncio.shield(self.ended)

    async def _drop(self, how: str) -> None:
        with contextlib.suppress(InfraError):
            await self._link.call(how, name=self._name)


class RemoteSandbox:
    """The base class of backends with a remote `Host`. For use from one event loop."""

    backend = "remote"

    def __init__(self, *, limits: ExecLimits | None = None) -> None:
        """Configure a sandbox; `open` or the first execution starts it.

        Args:
            limits: default limits of executions.
        """
        self.isolation = Isolation.REMOTE
        self.layers: tuple[str, ...] = ()
        self.limits = limits or ExecLimits()
        self._closed = False
        self._live: set[RemoteExecution] = set()
        self.sessions: set[RemoteSession] = set()
        """Open sessions."""

    # --- implemented by a backend ------------------------------------------------------------------------------------

    async def _acquire(self, tenant: str) -> Link:
        """Return a link for this tenant; open one if necessary.

        Raises:
            SandboxUnavailable: the host has never been available.
            InfraError: the host is currently unavailable.
        """
        raise NotImplementedError

    def _release(self, link: Link) -> None:
        """Release a link returned by `_acquire`; by default nothing happens."""

    async def _shut(self) -> None:
        """End the remote host."""

    def reported_isolation(self, isolation: Isolation) -> Isolation:
        """Return the isolation to report for a result: REMOTE, because the host is behind another wall."""
        return Isolation.REMOTE if isolation is not Isolation.NONE else isolation

    # --- opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the remote host, which checks its isolation; `run` does this if necessary.

        Raises:
            SandboxUnavailable: the host is not available.
            InfraError: the host is currently unavailable.
        """
        async with self.borrowed(""):
            pass

    async def aclose(self) -> None:
        """End all programs and the host. Repeated calls have no effect; the sandbox may be opened again."""
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
        """Hold a link for the duration of the block."""
        link = await self._acquire(tenant)
        try:
            yield link
        finally:
            self._release(link)

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
        tenant: str = "",
        channel: bool = False,
    ) -> ExecResult:
        """Execute a program and wait for its end, as `Sandbox.run` describes."""
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else bytes(stdin)
        job = self._job(program, files=files, fetch=fetch, policy=policy, limits=limits, size=len(data))
        job |= {"stdin": data, "fetch": list(fetch), "channel": channel, "tenant": tenant}
        for attempt in itertools.count(1):
            try:
                async with self.borrowed(tenant) as link:
                    result: ExecResult = await link.call("run", **job)
                break
            except SandboxBusy:
                raise
            except InfraError as error:
                result = ExecResult(ExecStatus.INFRA, detail=str(error))
            if attempt >= MAX_ATTEMPTS or self._closed:
                break
            await asyncio.sleep(_BACKOFF_S * attempt)
        return replace(self.annotate(result), attempts=result.attempts + attempt - 1)

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
    ) -> RemoteExecution:
        """Start an interactive program, as `Sandbox.start` describes.

        Raises:
            InfraError: the program could not be started in three attempts.
            ConfigError: an argument is invalid, or the files do not fit into the working folder.
        """
        job = self._job(program, files=files, fetch=(), policy=policy, limits=limits, size=0) | {"tenant": tenant}
        attempt = 1
        while True:
            try:
                return await self._launch(job, tenant)
            except SandboxBusy:
                raise
            except InfraError:
                if attempt >= MAX_ATTEMPTS or self._closed:
                    raise
            await asyncio.sleep(_BACKOFF_S * attempt)
            attempt += 1

    async def _launch(self, job: Mapping[str, Any], tenant: str) -> RemoteExecution:
        link, name = await self._acquire(tenant), uuid.uuid4().hex
        try:
            await link.call("start", name=name, **job)
        except BaseException:
            try:
                with contextlib.suppress(InfraError):
                    await link.call("kill", name=name)  # it may have started although the answer was lost
            finally:
                self._release(link)
            raise
        execution = RemoteExecution(link, name, self)
        self._live.add(execution)

        def forget(_: object) -> None:
            self._live.discard(execution)
            self._release(link)

        execution.ended.add_done_callback(forget)
        return execution

    def session(
        self, *, limits: ExecLimits | None = None, idle_s: float = 600.0, max_s: float = 3600.0, tenant: str = ""
    ) -> RemoteSession:
        """Return an interpreter that keeps its state between turns, for `async with`; see `InterpreterSession`."""
        options = {"limits": limits or self.limits, "idle_s": idle_s, "max_s": max_s}
        return RemoteSession(self, tenant=tenant, options=options)

    def annotate(self, result: ExecResult) -> ExecResult:
        """Return `result` with the isolation, layers and name of this backend."""
        infra = result.status is ExecStatus.INFRA and result.isolation is Isolation.NONE
        isolation = self.isolation if infra else self.reported_isolation(result.isolation)
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
        """Return the arguments of `run` and `start`, checked on this side to save a round trip."""
        check_program(program, policy)
        contents = {name: bytes(content) for name, content in (files or {}).items()}
        check_files(files or {}, fetch)
        size += len(program) if isinstance(program, str) else 0
        size += sum(len(content) for content in contents.values())
        if size > MAX_MIB << 20:
            raise ConfigError(
                f"sandbox: expected a program and files below {MAX_MIB} MiB, got {size} bytes. Reduce them"
            )
        return {
            "program": program if isinstance(program, str) else list(program),
            "files": contents,
            "policy": policy,
            "limits": limits or self.limits,
        }


class RemoteSession:
    """An `InterpreterSession` on the remote host; created by `RemoteSandbox.session`."""

    def __init__(self, sandbox: RemoteSandbox, *, tenant: str, options: Mapping[str, Any]) -> None:
        self._sandbox = sandbox
        self._tenant = tenant
        self._options = options
        self._name = uuid.uuid4().hex
        self._stack = contextlib.AsyncExitStack()
        self._link: Link | None = None
        self._ended: asyncio.Future[None] | None = None
        self._over: TurnResult | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Start the interpreter.

        Raises:
            InfraError: the interpreter could not be started.
        """
        if self._link is None:
            link = await self._stack.enter_async_context(self._sandbox.borrowed(self._tenant))
            try:
                await link.call("enter", name=self._name, tenant=self._tenant, **self._options)
            except BaseException:
                try:
                    with contextlib.suppress(InfraError):
                        await link.call("leave", name=self._name)  # it may have started although the answer was lost
                finally:
                    await self._stack.aclose()
                raise
            self._link = link
            self._ended = asyncio.ensure_future(link.call("ended", name=self._name))
            self._ended.add_done_callback(retrieve_exception)
            self._sandbox.sessions.add(self)

    @property
    def over(self) -> bool:
        """True once the session has ended; further turns return how it ended."""
        return self._over is not None or (self._ended is not None and self._ended.done())

    async def run(self, code: str) -> TurnResult:
        """Execute code as the next turn and wait for its end.

        Raises:
            ConfigError: the session is not open.
            SandboxBusy: too many executions are waiting for a run slot.
            asyncio.CancelledError: after the session has been ended.
        """
        if self._link is None:
            raise ConfigError("Session.run: expected an open session, got a new one. Use `async with`")
        if self._over is not None:
            return self._over
        try:
            result: TurnResult = await self._link.call("turn", name=self._name, code=code)
        except SandboxBusy:
            raise
        except InfraError as error:
            result = TurnResult(ExecStatus.INFRA, ended=True, detail=str(error))
        unknown = result.status is ExecStatus.INFRA and result.isolation is Isolation.NONE
        isolation = self._sandbox.isolation if unknown else self._sandbox.reported_isolation(result.isolation)
        result = replace(result, isolation=isolation, layers=self._sandbox.layers)
        if result.ended:
            self._over = TurnResult(
                result.status, ended=True, isolation=isolation, layers=result.layers, detail=result.detail
            )
        return result

    async def aclose(self) -> None:
        """End the session and its processes. Repeated calls have no effect."""
        self._over = self._over or TurnResult(ExecStatus.SIGNAL, ended=True, detail="session: closed")
        if self._link is not None:
            with contextlib.suppress(InfraError):
                await self._link.call("leave", name=self._name)
        self._sandbox.sessions.discard(self)
        await self._stack.aclose()
