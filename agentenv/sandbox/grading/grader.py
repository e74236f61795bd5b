"""The entry point of grading: `grade` runs a program against a test suite."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.errors import ConfigError
from agentenv.sandbox.grading.asserts import grade_asserts
from agentenv.sandbox.grading.executions import GradingRun
from agentenv.sandbox.grading.functions import grade_functions
from agentenv.sandbox.grading.in_process import grade_pytest
from agentenv.sandbox.grading.results import GradeResult, Integrity, TestResult
from agentenv.sandbox.grading.stdio import grade_stdio
from agentenv.sandbox.grading.suites import AssertSuite, FunctionSuite, PytestSuite, StdioSuite, TestSuite
from agentenv.sandbox.types import ExecLimits, Sandbox

_GRADERS: dict[type[Any], tuple[Callable[..., Awaitable[list[TestResult]]], Integrity]] = {
    StdioSuite: (grade_stdio, Integrity.OUTSIDE),
    FunctionSuite: (grade_functions, Integrity.OUTSIDE),
    AssertSuite: (grade_asserts, Integrity.PROXY),
    PytestSuite: (grade_pytest, Integrity.IN_PROCESS),
}


async def grade(
    sandbox: Sandbox,
    code: str,
    suite: TestSuite,
    *,
    limits: ExecLimits | None = None,
    stop_on_fail: bool = False,
) -> GradeResult:
    """Run the tests of a suite on a program. The program cannot make this raise or get a pass without evidence.

    The visible tests run first. Hidden ones are skipped, which is not a pass, if the program could not be loaded or a
    visible one timed out, so that a program that hangs costs these only. Tests for which the time limit of the running
    method leaves no time are timeouts; what the programs did not have of it, because they waited for a core or a slot,
    is added to it.

    Args:
        sandbox: the sandbox to run in.
        code: Python source, untrusted.
        suite: the tests.
        limits: limits of a single test; the sandbox's default if None. A test times out only if it had all of them for
            itself, or the time for all tests is over.
        stop_on_fail: skip the tests after the first one that did not pass. They count as not passed, so use this only
            for `GradeResult.all_passed`.

    Raises:
        ConfigError: `suite` is not a test suite, or the sandbox cannot run its tests.
        InfraError: the server of a remote sandbox does not answer.
        DataError: the tests of an AssertSuite never call the solution, or no program can fail one of a PytestSuite.
        asyncio.CancelledError: after all programs have been killed.
    """
    limits = limits or sandbox.limits
    if not isinstance(suite, StdioSuite) and (grade_there := getattr(sandbox, "grade", None)) is not None:
        graded: GradeResult = await grade_there(code, suite, limits=limits, stop_on_fail=stop_on_fail)
        return graded  # beside the programs that it runs, of a remote sandbox
    found = next((found for kind, found in _GRADERS.items() if isinstance(suite, kind)), None)
    if found is None:
        raise ConfigError(
            f"grade: expected a suite of tests, got {suite!r:.200}. Use a suite of agentenv.sandbox.grading."
        )
    grade_some, integrity = found
    grading = GradingRun(sandbox, limits, stop_on_fail)
    results = await grade_some(grading, code, suite, visible=True)
    if (skipped := grading.skipped(results)) is None:
        results += await grade_some(grading, code, suite, visible=False)
    else:
        names = [test if isinstance(test, str) else f"hidden[{i}]" for i, test in enumerate(suite.hidden)]
        results += [TestResult(name, False, skipped) for name in names]
    return grading.grade_result(results, integrity)
