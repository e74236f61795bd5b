"""The far side of a remote sandbox: a LocalSandbox that is asked by messages, and executions that are kept by name.

In a container or a virtual machine it is a program of its own, sent there as source: `main`. A Ray actor holds one too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from agentenv.errors import AgentEnvError, InfraError
from agentenv.sandbox._execution import LocalExecution
from agentenv.sandbox._remote_wire import Splitter, encode
from agentenv.sandbox.local import LocalSandbox
from agentenv.sandbox.session import Session, TurnResult
from agentenv.sandbox.types import ExecResult, Isolation, Status

KEPT_S = 120.0
"""How long the end of an execution is kept for who started it, and may be gone."""
CANCEL_S = 10.0
_METHODS = frozenset(
    ("open", "run", "start", "send", "receive", "wait", "finish", "kill", "enter", "turn", "ended", "leave")
)


class Host:
    """One sandbox, asked by name: its answers are values, errors of ours by their names."""

    def __init__(self) -> None:
        self._sandbox: LocalSandbox | None = None
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}
        self._executions: dict[str, LocalExecution] = {}
        self._kills: dict[str, int] = {}
        self._sessions: dict[str, Session] = {}

    @property
    def busy(self) -> bool:
        """Whether anybody waits for it, or talks to it."""
        return bool(self._tasks or self._executions or self._sessions)

    async def answer(self, number: Hashable, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a method gives: {"value": ...}, or {"error": [its class, its message]}."""
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
        """End what a call does, and wait until that is so."""
        if task := self._tasks.get(number):
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)

    async def aclose(self) -> None:
        """End everything."""
        for task in list(self._tasks.values()):
            task.cancel()
        for session in self._sessions.values():
            await session.aclose()
        if self._sandbox is not None:
            await self._sandbox.aclose()

    # --- methods that are asked for --------------------------------------------------------------------------------

    async def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Open the sandbox: the level that it found, and its slots."""
        if self._sandbox is None:
            level = Isolation(options.pop("min_isolation"))
            self._sandbox = LocalSandbox(min_isolation=level, **options)
        sandbox = self._sandbox
        await sandbox.open()
        return {"isolation": str(sandbox.isolation), "layers": sandbox.layers, "run_slots": sandbox.run_slots}

    def _opened(self) -> LocalSandbox:
        if self._sandbox is None:
            raise InfraError("sandbox: expected to be opened first, was not")
        return self._sandbox

    async def run(self, **arguments: Any) -> ExecResult:
        """As `Sandbox.run`."""
        kills = memory_kills()
        return excused(await self._opened().run(**arguments), kills)

    async def start(self, name: str, **arguments: Any) -> None:
        """As `Sandbox.start`; the caller names it."""
        execution = await self._opened().start(**arguments)
        self._executions[name] = execution
        self._kills[name] = memory_kills()
        execution.ended.add_done_callback(lambda _: _later(KEPT_S, self._executions, name))

    async def send(self, name: str, data: bytes) -> None:
        """As `Execution.send`."""
        if execution := self._executions.get(name):
            await execution.send(data)

    async def receive(self, name: str, max_bytes: int) -> bytes:
        """As `Execution.receive`."""
        execution = self._executions.get(name)
        return await execution.receive(max_bytes) if execution else b""

    async def wait(self, name: str) -> ExecResult:
        """Its end; it can still be read from."""
        execution = self._executions.get(name)
        if execution is None:
            raise InfraError(f"sandbox: expected execution {name!r} to be there, it is not: it ended, or never was")
        return excused(await asyncio.shield(execution.ended), self._kills.pop(name, 0))

    async def finish(self, name: str) -> None:
        """Forget it, and what it wrote and nobody read; it has ended."""
        if execution := self._executions.pop(name, None):
            await execution.finish()

    async def kill(self, name: str) -> None:
        """As `Execution.kill`; it is forgotten."""
        if execution := self._executions.pop(name, None):
            await execution.kill()

    async def enter(self, name: str, **options: Any) -> None:
        """Open a session, as `LocalSandbox.session`; the caller names it."""
        session = self._opened().session(**options)
        await session.open()
        self._sessions[name] = session
        _later(options["max_s"] + KEPT_S, self._sessions, name)

    async def turn(self, name: str, code: str) -> TurnResult:
        """As `Session.run`."""
        session = self._sessions.get(name)
        if session is None:
            raise InfraError(f"sandbox: expected session {name!r} to be there, it is not")
        result = await session.run(code)
        if result.ended:
            _later(KEPT_S, self._sessions, name)
        return result

    async def ended(self, name: str) -> None:
        """The end of a session, whatever ended it."""
        session = self._sessions.get(name)
        if session is not None and session._execution is not None:
            await asyncio.shield(session._execution.ended)

    async def leave(self, name: str) -> None:
        """As `Session.aclose`."""
        if session := self._sessions.pop(name, None):
            await session.aclose()


def _later(seconds: float, table: dict[str, Any], name: str) -> None:
    """Forget an entry, some time from now."""
    asyncio.get_running_loop().call_later(seconds, table.pop, name, None)


def excused(result: ExecResult, kills: int) -> ExecResult:
    """A program that the kernel ended since all of them together used too much memory: that was not its fault."""
    if result.signal != signal.SIGKILL or memory_kills() <= kills:
        return result
    detail = "container: expected memory for all programs, the kernel ended one for want of it. Raise its memory"
    return ExecResult(Status.INFRA, isolation=result.isolation, layers=result.layers, detail=detail)


def memory_kills() -> int:
    """How often the kernel has done so in this container."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0


# --- as a program of its own ------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """Messages in, answers out, until nobody is there any more."""

    def __init__(self, write: Callable[[bytes], None], *, armoured: bool) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.host = Host()
        self._write = write
        self._armoured = armoured
        self._splitter = Splitter(armoured=armoured)
        self._tasks: set[asyncio.Task[None]] = set()

    def data_received(self, data: bytes) -> None:
        """Take what came; what makes no sense is as the caller's end."""
        try:
            for message in self._splitter.feed(data):
                self._heed(message)
        except (ValueError, KeyError, TypeError, IndexError):
            self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        if not self.over.done():
            self.over.set_result(None)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self._write(encode(message, armoured=self._armoured))

    def _heed(self, message: dict[str, Any]) -> None:
        if "ping" in message:
            self.tell({"pong": message["ping"]})
            return
        if "cancel" in message:
            work = self.host.cancel(message["cancel"])
        else:
            work = self._answer(message["call"], message["method"], message["value"])
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, arguments: Mapping[str, Any]) -> None:
        self.tell({"answer": number, **await self.host.answer(number, method, arguments)})


async def _serve(source: int, sink: int, *, armoured: bool) -> None:
    loop = asyncio.get_running_loop()
    out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(sink, "wb", 0))
    connection = _Connection(out.write, armoured=armoured)
    await loop.connect_read_pipe(lambda: connection, os.fdopen(source, "rb", 0))
    connection.tell({"hello": sys.version.split()[0]})
    await connection.over
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_S):
            await connection.host.aclose()


def main(*, armoured: bool = False) -> None:
    """Serve on stdin and stdout until stdin ends.

    Args:
        armoured: messages are lines of base64, where the way there carries text only.
    """
    source, sink = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    try:
        asyncio.run(_serve(source, sink, armoured=armoured))
    finally:
        os._exit(0)
