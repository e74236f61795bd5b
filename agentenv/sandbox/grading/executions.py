"""The executions of one grading, and the programs that it sends into the sandbox."""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.util import MAGIC_NUMBER
from typing import Any

from agentenv._util.calls import MAX_GIVEN_BACK, give_back, seconds_left
from agentenv.errors import InfraError
from agentenv.sandbox.grading.results import GradeResult, Integrity, TestResult, Verdict
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Execution, Isolation, Sandbox

_CONCURRENT = 8
_TIMEOUTS = {ExecStatus.CPU_TIMEOUT: "cpu_s", ExecStatus.WALL_TIMEOUT: "wall_s"}
_LIMITS = {ExecStatus.MEMORY: "memory_mb", ExecStatus.OUTPUT_LIMIT: "stdout_kb", ExecStatus.DISK_LIMIT: "disk_mb"}
_START_TIMEOUT_S = 120.0
_MIN_TEST_S = 1.0
"""Shortest time that is worth starting a test."""
_END_S = 5.0
"""Time before the end of the caller's time limit, in which the last tests are judged."""
_TOO_LATE = "not run: the tests before it took the time of all"


@dataclass(slots=True)
class GradingRun:
    """One grading: its sandbox and limits, and what its executions report."""

    sandbox: Sandbox
    limits: ExecLimits
    stop_on_fail: bool
    signals: set[str] = field(default_factory=set)
    not_loaded: bool = False
    load_error: str = ""
    infra_detail: str = ""
    results: list[ExecResult] = field(default_factory=list)
    _left_at_start_s: float = field(default_factory=seconds_left)
    _given_back_s: float = 0.0

    async def run(self, program: str, **options: Any) -> ExecResult:
        """Execute a program with options of `Sandbox.run`. An InfraError becomes a result with status INFRA."""
        try:
            result = await self.sandbox.run(program, **{"limits": self.limits, **options})
        except InfraError as error:
            result = ExecResult(ExecStatus.INFRA, isolation=self.sandbox.isolation, detail=str(error))
        return self.record(result)

    async def start(self, program: str, *, limits: ExecLimits) -> Execution:
        """Start an interactive program.

        Raises:
            InfraError: the sandbox failed or had no free slot.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await self.sandbox.start(program, limits=limits)
        except TimeoutError as error:
            raise InfraError(
                f"sandbox: expected a free slot within {_START_TIMEOUT_S:g} s, got none. "
                "An AssertSuite needs two slots: add slots, or run fewer gradings."
            ) from error

    def out_of_time(self) -> tuple[Verdict, str] | None:
        """Return the verdict on a test that comes after the time for all tests, or None; `wall_s` ends with that time.

        Call this before each execution, so that a slow program does not take its own grade along. What the
        programs did not have of that time is added to it. They waited for a core or a slot then, which a policy can
        bring about: it is time, and never a missing grade.
        """
        left_s = seconds_left()
        elapsed_s = self._left_at_start_s + self._given_back_s - left_s
        if elapsed_s > 0:  # else there is no limit
            programs_s = sum(result.wall_s for result in self.results)  # several may run at the same time
            ran_s = programs_s - sum(result.run_delay_s for result in self.results)
            own_s = ran_s * min(elapsed_s / programs_s, 1.0) if programs_s else 0.0
            give_back(max(elapsed_s - own_s - self._given_back_s, 0.0))
            self._given_back_s += seconds_left() - left_s
            left_s = seconds_left()
        left_s -= min(_END_S, 0.1 * self._left_at_start_s)
        longest_s = left_s / (1 + MAX_GIVEN_BACK)
        self.limits = replace(self.limits, wall_s=min(self.limits.wall_s, max(longest_s, _MIN_TEST_S)))
        return None if left_s >= _MIN_TEST_S else (Verdict.TIMEOUT, _TOO_LATE)

    def skipped(self, results: Sequence[TestResult]) -> Verdict | None:
        """Return the verdict on the tests after these, if they are left out because of these."""
        verdicts = {result.verdict for result in results}
        if self.infra_detail or Verdict.INFRA in verdicts:
            return Verdict.INFRA
        failed = self.stop_on_fail and verdicts - {Verdict.PASSED}
        return Verdict.SKIPPED if self.load_error or Verdict.TIMEOUT in verdicts or failed else None

    def turn(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]:
        """Hold a run slot, or all, for the duration of the block, for programs by `start`, which take none."""
        turn = getattr(self.sandbox, "turn", None)
        return nullcontext() if turn is None else turn(alone=alone)

    def record(self, result: ExecResult) -> ExecResult:
        """Keep a result for the totals, with its tamper signal and sandbox failure; return it."""
        self.results.append(result)
        if result.status is ExecStatus.POLICY:
            self.signals.add("forbidden_system_call")
        if result.status is ExecStatus.INFRA and not self.infra_detail:
            self.infra_detail = result.detail or "the sandbox failed without a reason"
        return result

    def never_started(self, result: ExecResult) -> tuple[Verdict, str]:
        """Return the verdict for a program that ended before the solution was loaded."""
        how = result.detail or f"{result.status}, {result.stderr[-500:].strip()!r}"
        detail = f"the grader's own program ended before the solution: {how}"
        self.infra_detail = self.infra_detail or detail
        return Verdict.INFRA, detail

    def grade_result(self, tests: Iterable[TestResult], integrity: Integrity) -> GradeResult:
        """Return the grade with the totals of all executions."""
        levels = [result.isolation for result in self.results] or [self.sandbox.isolation]
        return GradeResult(
            tests=tuple(tests),
            integrity=integrity,
            tamper_signals=tuple(sorted(self.signals)),
            load_error=self.load_error,
            infra_detail=self.infra_detail,
            isolation=min(levels, key=lambda level: Isolation(level).strength),
            num_executions=len(self.results),
        )


def verdict_of(result: ExecResult, limits: ExecLimits) -> tuple[Verdict, str]:
    """Return the verdict and detail for a test in which an execution ended without an answer."""
    if result.status is ExecStatus.INFRA:
        return Verdict.INFRA, result.detail or ""
    if (limit := _TIMEOUTS.get(result.status)) is not None:
        return Verdict.TIMEOUT, f"it did not finish within {limit} = {getattr(limits, limit):g} s"
    if (limit := _LIMITS.get(result.status)) is not None:
        return Verdict.LIMIT, f"it exceeded {limit} = {getattr(limits, limit)}"
    if result.status is ExecStatus.OK:
        return Verdict.MISSING, "the program ended without a result"
    if result.status is ExecStatus.POLICY:
        return Verdict.ERROR, "it made a forbidden system call"
    how = f"signal {result.signal}" if result.status is ExecStatus.SIGNAL else f"exit code {result.exit_code}"
    return Verdict.ERROR, f"the program ended with {how}"


async def gather_limited(work: Sequence[Coroutine[Any, Any, Any]], *, max_concurrent: int) -> list[Any]:
    """Run coroutines, a few at a time, and return their results in order.

    If one raises or the caller is cancelled, all are cancelled.
    """
    slots = asyncio.Semaphore(min(max_concurrent, _CONCURRENT))

    async def one(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async with slots:
            return await coroutine

    tasks = [asyncio.ensure_future(one(coroutine)) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second cancellation would interrupt the cleanup of the first
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for coroutine in work:
            coroutine.close()


_LOADER = """\
import marshal, os, sys
{first}
if sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == {magic!r}:
    program = marshal.loads(bytes.fromhex({compiled!r}))
else:
    program = compile({source!r}, "agentenv", "exec")
exec(program)
"""


@cache
def guest_program(*names: str, entry: str, first: str = "") -> str:
    """Return modules of this package as one program, because it cannot import them inside the sandbox.

    The program contains bytecode for an interpreter of the same version, because compiling would take longer than the
    rest of a short execution.

    Args:
        names: the files of the modules, dependencies first.
        entry: the call that starts the program.
        first: a line that runs before any import.
    """
    texts = [(files(__package__) / name).read_text(encoding="utf-8") for name in names]
    lines = [line for text in texts for line in text.splitlines()]
    kept = [line for line in lines if not line.startswith(("from __future__", "from agentenv"))]
    source = "\n".join(["from __future__ import annotations", *kept, entry, ""])
    compiled = marshal.dumps(compile(source, "agentenv", "exec", dont_inherit=True)).hex()
    return _LOADER.format(first=first, magic=MAGIC_NUMBER, compiled=compiled, source=source)
