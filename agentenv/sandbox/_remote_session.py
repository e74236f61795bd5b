"""The near side of a session on a far host."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox._remote_link import Link, seen
from agentenv.sandbox.session import TurnResult
from agentenv.sandbox.types import Isolation, SandboxBusy, Status

if TYPE_CHECKING:
    from agentenv.sandbox._remote import RemoteSandbox


class RemoteSession:
    """An interpreter on the far side that stays between turns: as `Session`; made by `RemoteSandbox.session`."""

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
            InfraError: it could not be started.
        """
        if self._link is None:
            link = await self._stack.enter_async_context(self._sandbox.borrowed(self._tenant))
            try:
                await link.call("enter", name=self._name, tenant=self._tenant, **self._options)
            except BaseException:
                try:
                    with contextlib.suppress(InfraError):
                        await link.call("leave", name=self._name)  # it may be there although we never heard
                finally:
                    await self._stack.aclose()
                raise
            self._link = link
            self._ended = asyncio.ensure_future(link.call("ended", name=self._name))
            self._ended.add_done_callback(seen)
            self._sandbox.sessions.add(self)

    @property
    def over(self) -> bool:
        """Whether further turns only say how it ended."""
        return self._over is not None or (self._ended is not None and self._ended.done())

    async def run(self, code: str) -> TurnResult:
        """Execute code as the next turn, and wait for its end.

        Raises:
            ConfigError: the session was not opened.
            SandboxBusy: too many wait for a run slot.
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
            result = TurnResult(Status.INFRA, ended=True, detail=str(error))
        unknown = result.status is Status.INFRA and result.isolation is Isolation.NONE
        isolation = self._sandbox.isolation if unknown else self._sandbox.seen(result.isolation)
        result = replace(result, isolation=isolation, layers=self._sandbox.layers)
        if result.ended:
            self._over = TurnResult(
                result.status, ended=True, isolation=isolation, layers=result.layers, detail=result.detail
            )
        return result

    async def aclose(self) -> None:
        """End it, and all that it started; again is harmless."""
        self._over = self._over or TurnResult(Status.SIGNAL, ended=True, detail="session: closed")
        if self._link is not None:
            with contextlib.suppress(InfraError):
                await self._link.call("leave", name=self._name)
        self._sandbox.sessions.discard(self)
        await self._stack.aclose()
