"""An interpreter that keeps its state between turns: the next turn sees the variables and files of the last one.

    async with sandbox.session() as session:
        await session.run("x = 6")
        turn = await session.run("x * 7")
        assert turn.value == "42"

A driver in the same interpreter as the code reports the turns, so the code can forge its results: a session is a tool
for agents, never a grader.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, Self

from agentenv._util.off_loop import off_loop
from agentenv._util.paths import PACKAGE
from agentenv.errors import ConfigError
from agentenv.sandbox.local.execution import LocalExecution, readable
from agentenv.sandbox.types import ExecLimits, ExecStatus, Isolation

GRACE_S = 1.0
"""Time past its limit in which a turn may end without ending the session."""
_MAX_ANSWER = 1 << 20
_LIMITS = {"cpu": ExecStatus.CPU_TIMEOUT, "wall": ExecStatus.WALL_TIMEOUT, "memory": ExecStatus.MEMORY}


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The outcome of one turn."""

    status: ExecStatus
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    value: str | None = None
    """The `repr` of the last expression; None if there is none or its value is None."""
    traceback: str | None = None
    wall_s: float = 0.0
    ended: bool = False
    """True if the session is over; further turns return this outcome."""
    isolation: Isolation = Isolation.NONE
    detail: str | None = None


class _SessionHost(Protocol):
    """The part of a sandbox that a session uses."""

    isolation: Isolation

    async def start(
        self, program: str, *, files: Any = None, policy: Any = "pure", limits: ExecLimits | None
    ) -> LocalExecution:
        """Start a program, as `LocalSandbox.start` does."""

    def turn(self) -> Any:
        """Hold a run slot, as `LocalSandbox.turn` does."""


class InterpreterSession:
    """One interpreter and its working folder; created by `LocalSandbox.session`, opened by `async with`."""

    def __init__(self, sandbox: _SessionHost, *, limits: ExecLimits, idle_s: float, max_s: float) -> None:
        """Configure a session; `open` starts it.

        Args:
            sandbox: the sandbox to run in.
            limits: limits of each turn; memory and disk are shared by all turns.
            idle_s: seconds without a turn after which the session ends.
            max_s: total wall time and CPU time of the session, in seconds.
        """
        self._sandbox = sandbox
        self._limits = limits
        self._idle_s = idle_s
        self._total = replace(limits, wall_s=max_s, cpu_s=max_s)
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
            InfraError: the interpreter could not be started.
        """
        if self._execution is None:
            self._execution = await self._sandbox.start(_driver_source(), limits=self._total)
            self._wait_idle()

    async def aclose(self) -> None:
        """End the session and its processes. Repeated calls have no effect."""
        if self._idle:
            self._idle.cancel()
        self._over = self._over or self._end_result(ExecStatus.SIGNAL, "session: closed")
        if self._execution:
            await self._execution.kill()

    @property
    def over(self) -> bool:
        """True once the session has ended; further turns return how it ended."""
        return self._over is not None or (self._execution is not None and self._execution.ended.done())

    async def run(self, code: str, *, slot: AbstractAsyncContextManager[Any] | None = None) -> TurnResult:
        """Execute code as the next turn and wait for its end.

        Args:
            code: the code.
            slot: entered before the sandbox's own turn, in time that does not count as `idle_s`.

        Raises:
            ConfigError: the session is not open.
            SandboxBusy: too many executions are waiting for a run slot.
            asyncio.CancelledError: after the session has been ended.
        """
        if self._execution is None:
            raise ConfigError("Session.run: expected an open session, got a new one. Use `async with`")
        async with self._turn:
            if self.over:
                if self._over is None:
                    ended = await self._execution.finish()
                    self._over = self._end_result(ended.status, ended.detail or "session: ended between turns")
                return self._over
            if self._idle:
                self._idle.cancel()
            try:
                async with slot or nullcontext(), self._sandbox.turn():
                    return await self._take_turn(self._execution, code)
            finally:
                if self._over is None:
                    self._wait_idle()

    async def _take_turn(self, execution: LocalExecution, code: str) -> TurnResult:
        started = time.monotonic()
        limits = self._limits
        request = json.dumps({"code": code, "cpu_s": limits.cpu_s, "wall_s": limits.wall_s}).encode() + b"\n"
        answer: dict[str, Any] | None = None
        timed_out = False
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                await execution.send(request)
                answer = await self._receive(execution)
        except TimeoutError:
            timed_out = True
        except BaseException:
            await self.aclose()
            raise
        wall_s = time.monotonic() - started
        if answer is None:  # the interpreter is gone or does not answer
            result = await execution.kill()
            status, detail = result.status, result.detail
            if timed_out:
                status = ExecStatus.WALL_TIMEOUT
                detail = "session: the turn did not end at its limit, so the session was ended"
            elif status in (ExecStatus.OK, ExecStatus.SIGNAL):
                status = ExecStatus.NONZERO
                detail = "session: the code ended the interpreter, or closed its descriptor 3"
            self._over = self._end_result(status, detail)
            names = ("stdout", "stderr", "stdout_truncated", "stderr_truncated")
            return replace(self._over, wall_s=wall_s, **{name: getattr(result, name) for name in names})
        stdout, stdout_truncated = await execution.take_output("stdout")
        stderr, stderr_truncated = await execution.take_output("stderr")
        traceback, exit_code = answer.get("traceback"), answer.get("exit")
        failed = traceback is not None and exit_code != 0
        return TurnResult(
            _LIMITS.get(str(answer.get("limit")), ExecStatus.NONZERO if failed else ExecStatus.OK),
            stdout=stdout,
            stderr=stderr,
            stdout_truncated=stdout_truncated,
            stderr_truncated=stderr_truncated,
            value=await _safe_text(answer.get("value")),
            traceback=await _safe_text(traceback) if exit_code is None else None,
            wall_s=wall_s,
            isolation=self._sandbox.isolation,
        )

    async def _receive(self, execution: LocalExecution) -> dict[str, Any] | None:
        """Return the driver's answer; None if the driver ended or sent something else."""
        while (end := self._buffer.find(b"\n")) < 0:
            data = await execution.receive()
            if not data or len(self._buffer) > _MAX_ANSWER:
                return None
            self._buffer += data
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        try:
            answer = await off_loop(end, json.loads, line)
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def _wait_idle(self) -> None:
        # Also called when a turn got no slot, so that every session ends.
        def expire() -> None:
            why = f"session: ended after {self._idle_s:g} s without a turn"
            self._over = self._end_result(ExecStatus.WALL_TIMEOUT, why)
            if self._execution:
                self._execution.release()

        self._idle = asyncio.get_running_loop().call_later(self._idle_s, expire)

    def _end_result(self, status: ExecStatus, detail: str | None) -> TurnResult:
        return TurnResult(status, ended=True, detail=detail, isolation=self._sandbox.isolation)


@cache
def _driver_source() -> str:
    return (PACKAGE / "sandbox" / "guest" / "session_driver.py").read_text("utf-8")


async def _safe_text(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    return await off_loop(len(value), lambda: readable(value.encode("utf-8", "backslashreplace")))
