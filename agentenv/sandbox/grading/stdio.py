"""R1: programs that read standard input and print. The expected output stays here."""

from __future__ import annotations

from dataclasses import replace

from agentenv.errors import InfraError
from agentenv.sandbox._execution import readable
from agentenv.sandbox.grading._bench import Bench, shortened, side_by_side, verdict_of
from agentenv.sandbox.grading._judge import checked
from agentenv.sandbox.grading._traceback import own_traceback
from agentenv.sandbox.grading.compare import same_text
from agentenv.sandbox.grading.results import TestResult, Verdict
from agentenv.sandbox.grading.suites import StdioSuite, StdioTest
from agentenv.sandbox.types import ExecResult, Status

MAX_SLOW = 3
"""Tests that may run out of time; the ones after are missing, so that no grade takes for ever."""


async def grade_stdio(bench: Bench, code: str, suite: StdioSuite) -> list[TestResult]:
    """A verdict per test, the visible ones first."""
    tests = [(f"visible[{index}]", True, test) for index, test in enumerate(suite.visible)]
    tests += [(f"hidden[{index}]", False, test) for index, test in enumerate(suite.hidden)]
    if not bench.stop_on_fail:
        slow: list[str] = []
        work = [
            _graded(bench, code, suite=suite, name=name, visible=visible, test=test, slow=slow)
            for name, visible, test in tests
        ]
        # No more than run at a time: of those that wait it is still to be known whether they are needed.
        return await side_by_side(work, at_a_time=getattr(bench.sandbox, "run_slots", len(work)))
    results: list[TestResult] = []
    for name, visible, test in tests:
        if results and results[-1].verdict is not Verdict.PASSED:
            skipped = Verdict.INFRA if results[-1].verdict is Verdict.INFRA else Verdict.SKIPPED
            results.append(TestResult(name, visible, skipped))
            continue
        results.append(await _graded(bench, code, suite=suite, name=name, visible=visible, test=test, slow=[]))
    return results


async def _graded(
    bench: Bench, code: str, *, suite: StdioSuite, name: str, visible: bool, test: StdioTest, slow: list[str]
) -> TestResult:
    """One execution, judged; none where too many were `slow` already, to which it adds its name when it is."""
    if len(slow) >= MAX_SLOW:
        return TestResult(name, visible, Verdict.MISSING, detail=f"not run: {MAX_SLOW} tests ran out of time")
    room = max(bench.limits.stdout_kb, len(test.expected.encode(errors="replace")) // 512 + 1)
    limits = replace(bench.limits, stdout_kb=room)
    result = await bench.run(code, stdin=test.stdin.encode(errors="surrogateescape"), limits=limits)
    try:
        verdict, detail = _verdict(suite, test, result) or verdict_of(result, limits)
    except InfraError as error:
        verdict, detail = Verdict.INFRA, str(error)
        bench.infra_detail = bench.infra_detail or detail
    if verdict is Verdict.TIMEOUT:
        slow.append(name)
    if verdict is Verdict.ERROR:
        detail = "\n".join(part for part in (detail, own_traceback(result.stderr)) if part)
    return TestResult(
        name,
        visible,
        verdict,
        detail=shortened(detail, 2000),
        shown_input=shortened(test.stdin),
        shown_expected=shortened(test.expected),
        shown_got=shortened(result.stdout),
    )


def _verdict(suite: StdioSuite, test: StdioTest, result: ExecResult) -> tuple[Verdict, str] | None:
    """The verdict on what a program printed; None where it did not end well."""
    if result.status is not Status.OK:
        return None
    if result.stdout_truncated:
        return Verdict.LIMIT, f"it printed {result.stdout_bytes} bytes, more than are kept"
    if suite.checker is not None:
        good = checked(suite.checker, test.stdin, test.expected, _printed(result, "replace"))
    elif suite.mode == "exact":
        good = _same_bytes(test.expected, result)
    else:
        expected, got = (text.replace("\r\n", "\n") for text in (test.expected, _printed(result, "surrogateescape")))
        good = same_text(expected, got, suite.mode, suite.comparison)
    return (Verdict.PASSED, "") if good else (Verdict.FAILED, "")


def _printed(result: ExecResult, errors: str) -> str:
    """What it wrote; its text for people, with controls and other bytes escaped, where the backend has only that."""
    return result.stdout if result.stdout_data is None else result.stdout_data.decode(errors=errors)


def _same_bytes(expected: str, result: ExecResult) -> bool:
    wanted = expected.encode("utf-8", "surrogatepass")
    if result.stdout_data is None:
        return readable(wanted) == result.stdout and len(wanted) == result.stdout_bytes
    return wanted == result.stdout_data
