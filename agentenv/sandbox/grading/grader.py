"""The entry point of grading: `grade` runs a program against a test suite."""

from __future__ import annotations

import math
from collections.abc import Callable

from agentenv.errors import ConfigError
from agentenv.sandbox.grading.asserts import grade_asserts
from agentenv.sandbox.grading.executions import GradingRun
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
    seconds_left: Callable[[], float] = lambda: math.inf,
    give_back: Callable[[float], None] = lambda _: None,
) -> GradeResult:
    """Run all tests of a suite on a program. The program cannot make this raise or get a pass without evidence.

    Args:
        sandbox: the sandbox to run in.
        code: Python source, untrusted.
        suite: the tests.
        limits: limits of a single test; the sandbox's default if None. A test times out only if it had all of them for
            itself, or the time for all tests is over.
        stop_on_fail: skip the tests after the first one that did not pass. They count as not passed, so use this only
            for `GradeResult.all_passed`.
        seconds_left: returns the time that is left for all tests.
        give_back: adds to it the seconds that the programs did not have, because they waited for a core or a slot.

    Raises:
        ConfigError: `suite` is not a test suite, or the sandbox cannot run its tests.
        InfraError: the server of a remote sandbox does not answer.
        DataError: the tests of an AssertSuite never call the solution, or no program can fail one of a PytestSuite.
        asyncio.CancelledError: after all programs have been killed.
    """
    limits = limits or sandbox.limits
    if not isinstance(suite, StdioSuite) and (grade_there := getattr(sandbox, "grade", None)) is not None:
        graded: GradeResult = await grade_there(  # beside the programs that it runs, of a remote sandbox
            code, suite, limits=limits, stop_on_fail=stop_on_fail, seconds_left=seconds_left,
            give_back=give_back,
        )  # fmt: skip
        return graded
    grading = GradingRun(sandbox, limits, stop_on_fail, seconds_left, give_back)
    match suite:
        case StdioSuite():
            return grading.grade_result(await grade_stdio(grading, code, suite), Integrity.OUTSIDE)
        case FunctionSuite():
            return grading.grade_result(await grade_functions(grading, code, suite), Integrity.OUTSIDE)
        case AssertSuite():
            return grading.grade_result(await grade_asserts(grading, code, suite), Integrity.PROXY)
        case PytestSuite():
            return grading.grade_result(await grade_pytest(grading, code, suite), Integrity.IN_PROCESS)
    raise ConfigError(f"grade: expected a suite of tests, got {suite!r:.200}. Use a suite of agentenv.sandbox.grading.")
