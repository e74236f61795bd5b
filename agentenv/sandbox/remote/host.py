"""The host of a remote sandbox: a LocalSandbox that is controlled by messages, and its named executions.

In a container it is a separate program, sent there as source: `main`. On Ray it is part of an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from agentenv.errors import AgentEnvError, InfraError
from agentenv.sandbox.local.execution import LocalExecution
from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.local.session import InterpreterSession, TurnResult
from agentenv.sandbox.remote.wire import Splitter, encode
from agentenv.sandbox.types import ExecResult, Isolation

KEPT_S = 120.0
"""How long the result of an execution is kept for a caller that may be gone."""
CANCEL_S = 10.0
_METHODS = frozenset(
    ("open", "run", "start", "send", "receive", "wait", "finish", "kill", "enter", "turn", "ended", "leave")
)


class Host:
    """One sandbox whose methods are called by name. Errors of agentenv are returned by class name."""

    def __init__(self) -> None:
        self._sandbox: LocalSandbox | None = None
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}
        self._executions: dict[str, LocalExecution] = {}
        self._sessions: dict[str, InterpreterSession] = {}

    @property
    def busy(self) -> bool:
        """True while a call is running, or an execution or a session is open."""
        return bool(self._tasks or self._executions or self._sessions)

    async def answer(self, number: Hashable, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run a method and return {"value": ...} or {"error": [class name, message]}."""
        if method not in _METHODS:
            return {"error": [InfraError.__name__, f"sandbox: expected a method, got {method!r}"]}
        task = self._tasks[number] = asyncio.ensure_future(getattr(self, method)(**arguments))
        try:
            await asyncio.wait([task])
        finally:
            del self._tasks[number]
            task.cancel()
        if task.cancelled():
            return {"error": [InfraError.__name__, "sandbox: cancelled"]}
        if error := task.exception():
            name = type(error).__name__ if isinstance(error, AgentEnvError) else InfraError.__name__
            return {"error": [name, str(error) if isinstance(error, AgentEnvError) else f"sandbox: {error!r}"]}
        return {"value": task.result()}

    async def cancel(self, number: Hashable) -> None:
        """Stop the work of a call and wait until it has ended."""
        if task := self._tasks.get(number):
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)

    async def aclose(self) -> None:
        """End all calls, sessions and programs."""
        for task in list(self._tasks.values()):
            task.cancel()
        for session in self._sessions.values():
            await session.aclose()
        if self._sandbox is not None:
            await self._sandbox.aclose()

    # --- methods that can be called by name --------------------------------------------------------------------------

    async def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Open the sandbox and return its isolation, its layers and its number of run slots."""
        if self._sandbox is None:
            level = Isolation(options.pop("min_isolation"))
            self._sandbox = LocalSandbox(min_isolation=level, **options)
        sandbox = self._sandbox
        await sandbox.open()
        return {"isolation": str(sandbox.isolation), "layers": sandbox.layers, "run_slots": sandbox.run_slots}

    def _opened(self) -> LocalSandbox:
        if self._sandbox is None:
            raise InfraError("sandbox: expected an open sandbox, got a new one. Call `open` first")
        return self._sandbox

    async def run(self, **arguments: Any) -> ExecResult:
        """Run a program, as `Sandbox.run` does."""
        return await self._opened().run(**arguments)

    async def start(self, name: str, **arguments: Any) -> None:
        """Start a program under a name, as `Sandbox.start` does."""
        execution = await self._opened().start(**arguments)
        self._executions[name] = execution
        execution.ended.add_done_callback(lambda _: _forget_later(KEPT_S, self._executions, name))

    async def send(self, name: str, data: bytes) -> None:
        """Send bytes to an execution, as `Execution.send` does."""
        if execution := self._executions.get(name):
            await execution.send(data)

    async def receive(self, name: str, max_bytes: int) -> bytes:
        """Receive bytes from an execution, as `Execution.receive` does."""
        execution = self._executions.get(name)
        return await execution.receive(max_bytes) if execution else b""

    async def wait(self, name: str) -> ExecResult:
        """Wait for the end of an execution and return its result. Its output can still be received afterwards."""
        execution = self._executions.get(name)
        if execution is None:
            raise InfraError(
                f"sandbox: expected the name of an execution, got {name!r}. It was forgotten, or never existed"
            )
        return await asyncio.shield(execution.ended)

    async def finish(self, name: str) -> None:
        """Forget an execution that has ended, with the output that was not received."""
        if execution := self._executions.pop(name, None):
            await execution.finish()

    async def kill(self, name: str) -> None:
        """Kill an execution, as `Execution.kill` does, and forget it."""
        if execution := self._executions.pop(name, None):
            await execution.kill()

    async def enter(self, name: str, **options: Any) -> None:
        """Open a session under a name, as `LocalSandbox.session` does."""
        session = self._opened().session(**options)
        await session.open()
        self._sessions[name] = session
        _forget_later(options["max_s"] + KEPT_S, self._sessions, name)

    async def turn(self, name: str, code: str) -> TurnResult:
        """Run one turn of a session, as `InterpreterSession.run` does."""
        session = self._sessions.get(name)
        if session is None:
            raise InfraError(
                f"sandbox: expected the name of a session, got {name!r}. It was forgotten, or never existed"
            )
        result = await session.run(code)
        if result.ended:
            _forget_later(KEPT_S, self._sessions, name)
        return result

    async def ended(self, name: str) -> None:
        """Wait until a session has ended."""
        session = self._sessions.get(name)
        if session is not None:
            await session.wait_ended()

    async def leave(self, name: str) -> None:
        """Close a session, as `InterpreterSession.aclose` does."""
        if session := self._sessions.pop(name, None):
            await session.aclose()


def _forget_later(seconds: float, table: dict[str, Any], name: str) -> None:
    """Remove an entry of `table` after some time."""
    asyncio.get_running_loop().call_later(seconds, table.pop, name, None)


# --- as a separate program --------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """Reads messages and writes answers until the caller hangs up."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.host = Host()
        self._write = write
        self._splitter = Splitter()
        self._tasks: set[asyncio.Task[None]] = set()

    def data_received(self, data: bytes) -> None:
        """Handle the bytes that arrived. Bytes that are not messages count as the end of the connection."""
        try:
            for message in self._splitter.feed(data):
                if "ping" in message:
                    self.send({"pong": message["ping"]})
                    continue
                if "cancel" in message:
                    work = self.host.cancel(message["cancel"])
                else:
                    work = self._answer(message["call"], message["method"], message["value"])
                task = asyncio.ensure_future(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (ValueError, KeyError, TypeError, IndexError):
            self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        if not self.over.done():
            self.over.set_result(None)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self._write(encode(message))

    async def _answer(self, number: int, method: str, arguments: Mapping[str, Any]) -> None:
        self.send({"answer": number, **await self.host.answer(number, method, arguments)})


async def _serve(source: int, sink: int) -> None:
    loop = asyncio.get_running_loop()
    out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(sink, "wb", 0))
    connection = _Connection(out.write)
    await loop.connect_read_pipe(lambda: connection, os.fdopen(source, "rb", 0))
    connection.send({"hello": sys.version.split()[0]})
    await connection.over
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_S):
            await connection.host.aclose()


def main() -> None:
    """Serve on stdin and stdout until stdin ends."""
    source, sink = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    try:
        asyncio.run(_serve(source, sink))
    finally:
        os._exit(0)
