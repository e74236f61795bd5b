"""Grading of StdioSuite: programs that read standard input and print. The expected output stays outside."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from agentenv._util.off_loop import off_loop
from agentenv.errors import InfraError
from agentenv.sandbox.grading.compare import run_checker, same_text
from agentenv.sandbox.grading.executions import GradingRun, gather_limited, verdict_of
from agentenv.sandbox.grading.results import TestResult, Verdict, shorten
from agentenv.sandbox.grading.suites import StdioSuite, StdioTest
from agentenv.sandbox.local.execution import readable
from agentenv.sandbox.types import ExecResult, ExecStatus

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+')
MAX_SLOW = 3
"""Number of tests that may time out; later tests are missing, so that grading ends in a reasonable time."""


async def grade_stdio(grading: GradingRun, code: str, suite: StdioSuite, *, visible: bool) -> list[TestResult]:
    """Return a result per visible or hidden test."""
    tests = enumerate(suite.visible if visible else suite.hidden)
    named = [(f"visible[{index}]" if visible else f"hidden[{index}]", test) for index, test in tests]
    grade_one = partial(_grade_test, grading, code, suite=suite, visible=visible, slow=[])
    if not grading.stop_on_fail:
        work = [grade_one(name=name, test=test) for name, test in named]
        # No more than there are run slots, because a waiting test may turn out to be unnecessary.
        return await gather_limited(work, max_concurrent=grading.sandbox.run_slots)
    results: list[TestResult] = []
    for name, test in named:
        if (skipped := grading.skipped(results)) is not None:
            results.append(TestResult(name, visible, skipped))
        else:
            results.append(await grade_one(name=name, test=test))
    return results


async def _grade_test(
    grading: GradingRun, code: str, *, suite: StdioSuite, name: str, visible: bool, test: StdioTest, slow: list[str]
) -> TestResult:
    """Run and judge one test, unless MAX_SLOW tests are in `slow`; a test that times out adds its name there."""
    if len(slow) >= MAX_SLOW:
        return TestResult(name, visible, Verdict.MISSING, detail=f"not run: {MAX_SLOW} tests timed out")
    if (late := grading.out_of_time()) is not None:
        return TestResult(name, visible, late[0], detail=late[1])
    stdout_kb = max(grading.limits.stdout_kb, len(test.expected.encode(errors="replace")) // 512 + 1)
    limits = replace(grading.limits, stdout_kb=stdout_kb)
    result = await grading.run(code, stdin=test.stdin.encode(errors="surrogateescape"), limits=limits)
    # A checker may need the main thread.
    num_bytes = len(result.stdout) + len(result.stderr) + len(test.expected) if suite.checker is None else 0
    try:
        judged = await off_loop(num_bytes, _output_verdict, suite, test, result)
        verdict, detail = judged or verdict_of(result, limits)
    except InfraError as error:
        verdict, detail = Verdict.INFRA, str(error)
        grading.infra_detail = grading.infra_detail or detail
    if verdict is Verdict.TIMEOUT:
        slow.append(name)
    if verdict is Verdict.ERROR:
        traceback = await off_loop(len(result.stderr), own_traceback, result.stderr)
        detail = "\n".join(part for part in (detail, traceback) if part)
    shown = (shorten(text) for text in (test.stdin, test.expected, result.stdout))
    return TestResult(name, visible, verdict, shorten(detail, 2000), *shown)


def own_traceback(stderr: str, max_chars: int = 1500) -> str:
    """Return the last traceback without frames of libraries and of the sandbox; without one, the end of the text.

    A model may see this part of a program's standard error.
    """
    lines = stderr.rstrip("\n").split("\n")
    starts = [index for index, line in enumerate(lines) if line == "Traceback (most recent call last):"]
    if starts:
        kept: list[str] = []
        own = True
        for line in lines[starts[-1] + 1 :]:
            if frame := _FRAME.match(line):
                own = not frame["file"].startswith(("/", "<frozen"))
            elif not line.startswith(" "):
                own = True
            if own:
                kept.append(line)
        lines = kept
    text = "\n".join(lines)
    return text if len(text) <= max_chars else f"… {text[-max_chars:]}"


def _output_verdict(suite: StdioSuite, test: StdioTest, result: ExecResult) -> tuple[Verdict, str] | None:
    """Return the verdict on the output of a program; None if its end was wrong."""
    failed = result.status is not ExecStatus.OK
    raised = result.stderr_truncated or any(map(_FRAME.match, result.stderr.split("\n")))
    if failed and (raised or not suite.any_exit_code or result.status is not ExecStatus.NONZERO):
        return None
    if result.stdout_truncated:
        return Verdict.LIMIT, f"it printed {result.stdout_bytes} bytes, more than are kept"
    if suite.checker is not None:
        good = run_checker(suite.checker, test.stdin, test.expected, _printed(result, "replace"))
    elif suite.mode == "exact":
        wanted = test.expected.encode("utf-8", "surrogatepass")
        if result.stdout_data is None:
            good = readable(wanted) == result.stdout and len(wanted) == result.stdout_bytes
        else:
            good = wanted == result.stdout_data
    else:
        expected, got = (text.replace("\r\n", "\n") for text in (test.expected, _printed(result, "surrogateescape")))
        good = same_text(expected, got, suite.mode, suite.comparison)
    if failed and not good:
        return None
    return (Verdict.PASSED, "") if good else (Verdict.FAILED, "")


def _printed(result: ExecResult, errors: str) -> str:
    """Return the output; with escaped control characters if the backend has only text."""
    return result.stdout if result.stdout_data is None else result.stdout_data.decode(errors=errors)
