"""Talking to a program where a backend can only run one: run it anew with all that it was told, hear what is new.

Of tests by proxy this keeps what matters: the solution's text and the tests never meet. It costs a run of each side per
call, and the tests must call alike each time; that is checked, and `random` is seeded for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentenv.errors import InfraError
from agentenv.sandbox.types import ExecLimits, ExecResult, Status

if TYPE_CHECKING:
    from agentenv.sandbox.grading._bench import Bench

MAX_RUNS = 256
"""Of one program: it is asked no more calls than that."""
_ROOM = 3
_WAITING = 86
"""Exit code of a program that has read all that it was told."""
_PROGRAM = """\
import os
{first}
def wire(read=os.read, leave=os._exit):
    parts = []
    while part := read(0, 1 << 16):
        parts.append(part)
    def talk(fd, size):
        if fd != 3:
            return read(fd, size)
        if not parts:
            leave({waiting})
        return parts.pop(0)
    os.read = talk
wire()
del wire
exec(compile({source!r}, "main.py", "exec", dont_inherit=True))
"""


class Replayed:
    """An `Execution` made of runs; its program reads descriptor 3 by `os.read`, in any sizes from 64 KiB on."""

    def __init__(self, bench: Bench, program: str, limits: ExecLimits, *, exact: bool) -> None:
        first = "import random\nrandom.seed(0)" if exact else ""
        self._bench, self._exact = bench, exact
        self._limits = replace(limits, channel_kb=_ROOM * limits.channel_kb)  # all that it ever said, each time
        self._program = _PROGRAM.format(first=first, waiting=_WAITING, source=program)
        self._told, self._news, self._num_runs = b"", False, 0
        self._heard: list[bytes] = []
        self._result = ExecResult(Status.OK, isolation=bench.sandbox.isolation, backend=bench.sandbox.backend)

    async def send(self, data: bytes) -> None:
        """Tell it more; it hears that when somebody listens."""
        self._told, self._news = self._told + data, True

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """What it says to all that it was told, but for what it said before; b"" where that is nothing.

        Raises:
            InfraError: the sandbox failed; or it is `exact`, and said something else before; or it was asked too often.
        """
        if not self._news:
            return b""  # it has ended, or waits for what nobody tells it
        self._news, self._num_runs = False, self._num_runs + 1
        if self._num_runs > MAX_RUNS:
            raise InfraError(
                f"{self._bench.sandbox.backend}: expected at most {MAX_RUNS} calls of tests, got more. Use a backend "
                "that can be talked to, as local or docker"
            )
        self._result = result = await self._bench.run(
            self._program, stdin=self._told, limits=self._limits, channel=True
        )
        if result.status is Status.INFRA:
            raise InfraError(result.detail or "the sandbox failed")
        if self._exact and len(result.channel) >= self._limits.channel_kb * 1024:
            raise InfraError(
                f"{result.backend}: expected channel_kb = {self._limits.channel_kb} to be enough. Raise it"
            )
        lines = result.channel.split(b"\n")
        lines = [line + b"\n" for line in lines[:-1]] + [lines[-1]] * bool(lines[-1])
        if self._exact and lines[: len(self._heard)] != self._heard:
            raise InfraError(
                f"{result.backend}: expected tests that call alike each time, got others. Use a backend that can be "
                "talked to, as local or docker"
            )
        new = lines[len(self._heard) :]
        self._heard += new
        return b"".join(new)

    async def finish(self) -> ExecResult:
        """How its last run ended; well, where it only waited."""
        if self._result.exit_code == _WAITING:
            return replace(self._result, status=Status.OK, exit_code=0)
        return self._result

    async def kill(self) -> ExecResult:
        """The same: nothing runs. Its times are those of runs that have been counted."""
        return replace(await self.finish(), wall_s=0.0, cpu_s=0.0, queue_s=0.0)
