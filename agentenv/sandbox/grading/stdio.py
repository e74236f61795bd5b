"""R1: programs that read standard input and print. The expected output stays here."""

from __future__ import annotations

from dataclasses import replace

from agentenv.errors import InfraError
from agentenv.sandbox.grading._bench import Bench, shortened, side_by_side, verdict_of
from agentenv.sandbox.grading._judge import checked
from agentenv.sandbox.grading._traceback import own_traceback
from agentenv.sandbox.grading.compare import same_text
from agentenv.sandbox.grading.results import TestResult, Verdict
from agentenv.sandbox.grading.suites import StdioSuite, StdioTest
from agentenv.sandbox.types import ExecResult, Status


async def grade_stdio(bench: Bench, code: str, suite: StdioSuite) -> list[TestResult]:
    """A verdict per test, the visible ones first."""
    tests = [(f"visible[{index}]", True, test) for index, test in enumerate(suite.visible)]
    tests += [(f"hidden[{index}]", False, test) for index, test in enumerate(suite.hidden)]
    if not bench.stop_on_fail:
        work = [
            _graded(bench, code, suite=suite, name=name, visible=visible, test=test) for name, visible, test in tests
        ]
        return await side_by_side(work)
    results: list[TestResult] = []
    for name, visible, test in tests:
        if results and results[-1].verdict is not Verdict.PASSED:
            skipped = Verdict.INFRA if results[-1].verdict is Verdict.INFRA else Verdict.SKIPPED
            results.append(TestResult(name, visible, skipped))
            continue
        results.append(await _graded(bench, code, suite=suite, name=name, visible=visible, test=test))
    return results


async def _graded(
    bench: Bench, code: str, *, suite: StdioSuite, name: str, visible: bool, test: StdioTest
) -> TestResult:
    """One execution, judged."""
    room = max(bench.limits.stdout_kb, len(test.expected.encode(errors="replace")) // 512 + 1)
    limits = replace(bench.limits, stdout_kb=room)
    result = await bench.run(code, stdin=test.stdin.encode(errors="surrogateescape"), limits=limits)
    try:
        verdict, detail = _verdict(suite, test, result) or verdict_of(result, limits)
    except InfraError as error:
        verdict, detail = Verdict.INFRA, str(error)
        bench.infra_detail = bench.infra_detail or detail
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
        good = checked(suite.checker, test.stdin, test.expected, result.stdout)
    else:
        good = same_text(_as_printed(test.expected), result.stdout, suite.mode, suite.comparison)
        if suite.mode == "exact":
            good = good and result.stdout_bytes == len(test.expected.encode(errors="replace"))
    return (Verdict.PASSED, "") if good else (Verdict.FAILED, "")


def _as_printed(expected: str) -> str:
    """The expected text, with the newlines that Python prints."""
    return expected.replace("\r\n", "\n")
