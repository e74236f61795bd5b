"""An interpreter that stays between turns: what one turn defines and writes, the next one finds.

    async with sandbox.session() as session:
        await session.run("x = 6")
        turn = await session.run("x * 7")
        assert turn.value == "42"

Turns are told apart by a driver in the same interpreter as the code, so code can forge what it says of itself:
a session is a tool to work with, never a grader.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

from agentenv.errors import ConfigError
from agentenv.sandbox._execution import LocalExecution, readable
from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Status

GRACE_S = 1.0
"""Past its limit, for a turn to end by itself and the session to live on."""
_MAX_FRAME = 1 << 20
_LIMITS = {"cpu": Status.CPU_TIMEOUT, "wall": Status.WALL_TIMEOUT, "memory": Status.MEMORY}


@dataclass(frozen=True, slots=True)
class TurnResult:
    """How one turn went."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    value: str | None = None
    """`repr` of the last expression, if there was one and it was not None."""
    traceback: str | None = None
    wall_s: float = 0.0
    ended: bool = False
    """The session is over: nothing of it is left, and further turns only say so."""
    isolation: Isolation = Isolation.NONE
    layers: tuple[str, ...] = ()
    detail: str | None = None


class _Host(Protocol):
    """What a session needs of its sandbox."""

    isolation: Isolation
    layers: tuple[str, ...]

    async def start(
        self, program: str, *, files: Any = None, policy: Any = "pure", limits: ExecLimits | None, tenant: str
    ) -> LocalExecution:
        """As `LocalSandbox.start`."""

    def turn(self, tenant: str) -> Any:
        """As `LocalSandbox.turn`."""


class Session:
    """One interpreter and its working folder; made by `LocalSandbox.session`, opened by `async with`."""

    def __init__(self, sandbox: _Host, *, limits: ExecLimits, idle_s: float, max_s: float, tenant: str) -> None:
        """`limits` hold for each turn, but memory and disk for all of them together.

        Args:
            sandbox: where it runs.
            limits: of a turn.
            idle_s: between turns before it ends by itself.
            max_s: that it may be there, and use of CPU, altogether.
            tenant: who asks: turns wait for a run slot like executions.
        """
        self._sandbox = sandbox
        self._limits = limits
        self._idle_s = idle_s
        self._total = replace(limits, wall_s=max_s, cpu_s=max_s)
        self._tenant = tenant
        self._execution: LocalExecution | None = None
        self._buffer = b""
        self._idle: asyncio.TimerHandle | None = None
        self._over: TurnResult | None = None
        self._turn = asyncio.Lock()  # one turn at a time

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
        if self._execution is None:
            self._execution = await self._sandbox.start(_driver(), limits=self._total, tenant=self._tenant)
            self._wait_idle()

    async def aclose(self) -> None:
        """End it, and all that it started; again is harmless."""
        if self._idle:
            self._idle.cancel()
        self._over = self._over or self._ended(Status.SIGNAL, "session: closed")
        if self._execution:
            await self._execution.kill()

    @property
    def over(self) -> bool:
        """Whether it has ended, so that a turn would only say so."""
        return self._over is not None or (self._execution is not None and self._execution.ended.done())

    async def run(self, code: str) -> TurnResult:
        """Execute code as the next turn, and wait for its end.

        Raises:
            ConfigError: the session was not opened.
            SandboxBusy: too many wait for a run slot.
            asyncio.CancelledError: after the session has been ended.
        """
        if self._execution is None:
            raise ConfigError("Session.run: expected an open session, got a new one. Use `async with`")
        async with self._turn:
            if self.over:
                return await self._after()
            if self._idle:
                self._idle.cancel()
            try:
                async with self._sandbox.turn(self._tenant):
                    return await self._take_turn(self._execution, code)
            finally:
                if self._over is None:
                    self._wait_idle()

    async def _take_turn(self, execution: LocalExecution, code: str) -> TurnResult:
        started = time.monotonic()
        limits = self._limits
        request = json.dumps({"code": code, "cpu_s": limits.cpu_s, "wall_s": limits.wall_s}).encode()
        answer: dict[str, Any] | None = None
        timed_out = False
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                await execution.send(len(request).to_bytes(4, "little") + request)
                answer = await self._receive(execution)
        except TimeoutError:
            timed_out = True
        except BaseException:
            await self.aclose()
            raise
        if answer is None:
            return await self._broken(execution, timed_out=timed_out, wall_s=time.monotonic() - started)
        result = self._read_answer(answer, wall_s=time.monotonic() - started)
        return self._with_output(execution, result)

    async def _receive(self, execution: LocalExecution) -> dict[str, Any] | None:
        """The driver's answer; None when it ended, or said what is none."""
        while True:
            size = int.from_bytes(self._buffer[:4], "little") if len(self._buffer) >= 4 else 0
            if size > _MAX_FRAME:
                return None
            if len(self._buffer) >= 4 + size > 4:
                frame, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
                return _parsed(frame)
            if len(self._buffer) >= 4 and size == 0:
                return None
            data = await execution.receive()
            if not data:
                return None
            self._buffer += data

    def _read_answer(self, answer: dict[str, Any], *, wall_s: float) -> TurnResult:
        trace, limit = answer.get("traceback"), answer.get("limit")
        failed = trace is not None and answer.get("exit") != 0
        status = _LIMITS.get(str(limit), Status.NONZERO if failed else Status.OK)
        return TurnResult(
            status,
            value=_text(answer.get("value")),
            traceback=_text(trace) if answer.get("exit") is None else None,
            wall_s=wall_s,
            isolation=self._sandbox.isolation,
            layers=self._sandbox.layers,
        )

    async def _broken(self, execution: LocalExecution, *, timed_out: bool, wall_s: float) -> TurnResult:
        """The interpreter is gone, or past talking to: how it ended is how the turn ended."""
        result = await execution.kill()
        status, detail = result.status, result.detail
        if timed_out:
            status, detail = Status.WALL_TIMEOUT, "session: the turn did not end at its limit, so the session was ended"
        elif status in (Status.OK, Status.SIGNAL):
            status, detail = Status.NONZERO, "session: the code ended the interpreter, or what it is talked to over"
        self._over = self._ended(status, detail)
        return replace(
            self._over,
            stdout=result.stdout,
            stderr=result.stderr,
            stdout_truncated=result.stdout_truncated,
            stderr_truncated=result.stderr_truncated,
            wall_s=wall_s,
        )

    async def _after(self) -> TurnResult:
        if self._over is None:
            assert self._execution is not None
            result: ExecResult = await self._execution.finish()
            self._over = self._ended(result.status, result.detail or "session: it ended between turns")
        return self._over

    def _with_output(self, execution: LocalExecution, result: TurnResult) -> TurnResult:
        (stdout, cut_out), (stderr, cut_err) = (execution.take_output(name) for name in ("stdout", "stderr"))
        return replace(result, stdout=stdout, stderr=stderr, stdout_truncated=cut_out, stderr_truncated=cut_err)

    def _wait_idle(self) -> None:
        """Also where a turn got no slot, so that none is waited for for ever."""
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._expire)

    def _expire(self) -> None:
        self._over = self._ended(Status.WALL_TIMEOUT, f"session: ended after {self._idle_s:g} s without a turn")
        if self._execution:
            self._execution.release()

    def _ended(self, status: Status, detail: str | None) -> TurnResult:
        sandbox = self._sandbox
        return TurnResult(status, ended=True, detail=detail, isolation=sandbox.isolation, layers=sandbox.layers)


@cache
def _driver() -> str:
    return Path(__file__).with_name("_session_driver.py").read_text()


def _parsed(frame: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(frame)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _text(value: object) -> str | None:
    """Untrusted text, made safe to show."""
    return readable(value.encode("utf-8", "backslashreplace")) if isinstance(value, str) else None
