"""`grade`: a program against a suite."""

from __future__ import annotations

from agentenv.errors import ConfigError
from agentenv.sandbox.grading._bench import Bench
from agentenv.sandbox.grading.asserts import grade_asserts
from agentenv.sandbox.grading.functions import grade_functions
from agentenv.sandbox.grading.in_process import grade_pytest
from agentenv.sandbox.grading.results import GradeResult, Integrity
from agentenv.sandbox.grading.stdio import grade_stdio
from agentenv.sandbox.grading.suites import AssertSuite, FunctionSuite, PytestSuite, StdioSuite, TestSuite
from agentenv.sandbox.types import ExecLimits, Sandbox


async def grade(
    sandbox: Sandbox,
    code: str,
    suite: TestSuite,
    *,
    limits: ExecLimits | None = None,
    stop_on_fail: bool = False,
    tenant: str = "",
) -> GradeResult:
    """The verdict of every test on a program. Nothing that the program does raises or yields a pass without evidence.

    Args:
        sandbox: where it runs.
        code: Python source: untrusted.
        suite: its tests.
        limits: what a single test may use: no test is a timeout that did not have all of it for itself. The sandbox's
            own when None.
        stop_on_fail: leave the tests after one that did not pass out. They count as not passed, so use it where only
            `GradeResult.all_passed` is.
        tenant: who asks, for the sandbox's queue.

    Raises:
        ConfigError: the suite is none, or the sandbox cannot run such tests.
        asyncio.CancelledError: after everything that runs has been killed.
    """
    bench = Bench(sandbox, limits or getattr(sandbox, "limits", None) or ExecLimits(), tenant, stop_on_fail)
    match suite:
        case StdioSuite():
            return bench.graded(await grade_stdio(bench, code, suite), Integrity.OUTSIDE)
        case FunctionSuite():
            return bench.graded(await grade_functions(bench, code, suite), Integrity.OUTSIDE)
        case AssertSuite():
            return bench.graded(await grade_asserts(bench, code, suite), Integrity.PROXY)
        case PytestSuite():
            return bench.graded(await grade_pytest(bench, code, suite), Integrity.IN_PROCESS)
    raise ConfigError(f"grade: expected a suite of tests, got {suite!r:.200}. Make one of agentenv.sandbox.grading.")
