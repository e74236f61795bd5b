"""Grading of FunctionSuite: arguments enter the sandbox, and values leave it as JSON to be compared outside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv._util.off_loop import off_loop
from agentenv.errors import InfraError
from agentenv.sandbox.grading.codec import CodecError, decode, dump_line, encode, parse_line
from agentenv.sandbox.grading.compare import run_checker, same_value
from agentenv.sandbox.grading.executions import GradingRun, gather_limited, guest_program, verdict_of
from agentenv.sandbox.grading.results import TestResult, Verdict, shorten, show
from agentenv.sandbox.grading.suites import FunctionSuite, FunctionTest
from agentenv.sandbox.types import ExecResult, ExecStatus

_MAX_BLAMED = 3
"""Number of tests in a batch that may end a process; later tests are missing."""


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    visible: bool
    test: FunctionTest
    entry_point: str


@dataclass(slots=True)
class ProcessAnswers:
    """The answers of one process, as far as they follow the protocol."""

    started: bool = False
    """True once the solution is being loaded; an earlier end is a failure of the sandbox."""
    loaded: bool = False
    load_error: str = ""
    by_id: dict[int, dict[str, Any]] = field(default_factory=dict)
    signals: tuple[str, ...] = ()
    ended: bool = False
    num_bytes: int = 0
    broken: str = ""
    """How the answers break the protocol, so that none of them counts."""


def read_answers(channel: bytes, num_calls: int, *, complete: bool) -> ProcessAnswers:
    """Return the answers of one process: one line per call, in order; anything else breaks the protocol.

    Args:
        channel: the output of the process.
        num_calls: the number of calls that it received.
        complete: True if the process ended by itself, so that its last line must be complete.
    """
    *lines, rest = channel.split(b"\n")
    answers = ProcessAnswers()
    try:
        for line in lines:
            message = parse_line(line)
            match message:
                case _ if answers.ended:
                    raise CodecError("a line after the last one")
                case {"begin": True} if len(message) == 1 and not answers.started:
                    answers.started = True
                case _ if not answers.started:
                    raise CodecError("a line before the first one")
                case {"ready": True} if len(message) == 1 and not answers.loaded and not answers.load_error:
                    answers.loaded = True
                case {"load_error": {"text": str(text)}} if not answers.loaded and not answers.load_error:
                    answers.load_error = text or "it could not be loaded"
                case {"end": True, "signals": [*signals]} if len(message) == 2 and all(
                    isinstance(one, str) for one in signals
                ):
                    answers.ended = True
                    answers.signals = tuple(str(one)[:40] for one in signals[:16])
                case {"id": int(number), "value": _} | {"id": int(number), "error": {"text": str()}} if (
                    answers.loaded
                    and len(message) == 2
                    and type(number) is int
                    and number == len(answers.by_id) < num_calls
                ):
                    answers.by_id[number] = message
                case _:
                    raise CodecError(f"an unexpected line with the keys {sorted(message)[:4]!r}")
        if rest and (complete or answers.ended):
            raise CodecError("an incomplete line")
    except CodecError as error:
        answers.broken = str(error)
    return answers


async def grade_functions(grading: GradingRun, code: str, suite: FunctionSuite, *, visible: bool) -> list[TestResult]:
    """Return a result per visible or hidden test, which never share a process."""
    kind, tests = ("visible", suite.visible) if visible else ("hidden", suite.hidden)
    cases = [_Case(f"{kind}[{index}]", visible, test, suite.entry_point) for index, test in enumerate(tests)]
    batches = [cases[start : start + suite.batch] for start in range(0, len(cases), suite.batch)]
    results: list[TestResult] = []
    if grading.stop_on_fail:
        for batch in batches:
            if (skipped := grading.skipped(results)) is not None:
                results += [_result(case, skipped) for case in batch]
            else:
                results += await _grade_batch(grading, code, suite=suite, cases=batch)
    else:
        work = [_grade_batch(grading, code, suite=suite, cases=batch) for batch in batches]
        # No more than there are run slots: time in which one waits for another of them is not that of all tests.
        done = await gather_limited(work, max_concurrent=grading.sandbox.run_slots)
        results = [result for each in done for result in each]
    if grading.not_loaded and not suite.visible and grading.out_of_time() is None:
        # The error may be shown to the model, so it must come from a process that has no hidden tests.
        execution, answers = await _execute(grading, code, suite, ())
        _process_verdict(grading, answers, execution, visible=True)
    return results


async def _grade_batch(
    grading: GradingRun, code: str, *, suite: FunctionSuite, cases: Sequence[_Case]
) -> list[TestResult]:
    """Return the results of one batch.

    A process may end during a call. Earlier calls may have used up its limits or changed its state, so that call is
    repeated as the first call of a new process, and fails only if that process ends in it too.
    """
    results: list[TestResult] = []
    blamed = 0
    while len(results) < len(cases):
        pending = cases[len(results) :]
        if (late := grading.out_of_time()) is not None:
            return results + [_result(case, *late) for case in pending]
        execution, answers = await _execute(grading, code, suite, pending)
        common = _process_verdict(grading, answers, execution, visible=cases[0].visible)
        if common is not None:
            return results + [_result(case, *common) for case in pending]
        results += [
            await _judge(grading, suite, case=case, answer=answers.by_id[index], num_bytes=answers.num_bytes)
            for index, case in enumerate(pending[: len(answers.by_id)])
        ]
        if not answers.by_id:
            results.append(_result(pending[0], *_end_verdict(grading, execution)))
            blamed += 1
        failed = any(result.verdict is not Verdict.PASSED for result in results)
        if blamed == _MAX_BLAMED or (grading.stop_on_fail and failed):
            verdict = Verdict.SKIPPED if grading.stop_on_fail else Verdict.MISSING
            results += [_result(case, verdict, "not run") for case in cases[len(results) :]]
    return results


async def _execute(
    grading: GradingRun, code: str, suite: FunctionSuite, cases: Sequence[_Case]
) -> tuple[ExecResult, ProcessAnswers]:
    """Run one process and return its result and answers."""
    program = guest_program("codec.py", "guest/serve.py", entry="serve(0)")
    # Tests may have megabytes.
    stdin, max_bytes = await asyncio.to_thread(_requests, code, suite, cases, grading.limits.channel_kb * 1024 // 4)
    channel_kb = max(grading.limits.channel_kb, 2 * max_bytes // 1024)
    limits = replace(grading.limits, channel_kb=channel_kb)
    execution = await grading.run(program, stdin=stdin, limits=limits, channel=True)
    output = execution.channel
    complete = execution.status is ExecStatus.OK and len(output) < channel_kb * 1024
    answers = await off_loop(len(output), read_answers, output, len(cases), complete=complete)
    answers.num_bytes = len(output)
    grading.signals.update(answers.signals)
    return execution, answers


def _requests(code: str, suite: FunctionSuite, cases: Sequence[_Case], min_bytes: int) -> tuple[bytes, int]:
    """Return the lines for one process, and the size in bytes that a value of it may have, at least `min_bytes`.

    That is a power of two, at least twice the largest expected value. The process learns it, but not the value's size.
    """
    expected = (len(dump_line({"value": encode(case.test.expected)})) for case in cases)
    max_bytes = max(min_bytes, 1 << (2 * max(expected, default=0)).bit_length())
    header = {"code": code, "prelude": suite.prelude, "names": suite.entry_point.split("."), "max_bytes": max_bytes}
    calls = [
        {
            "id": index,
            "name": suite.entry_point,
            "args": encode(list(case.test.args)),
            "kwargs": encode(dict(case.test.kwargs)),
        }
        for index, case in enumerate(cases)
    ]
    return b"".join(dump_line(message) for message in (header, *calls, {"end": True})), max_bytes


def _process_verdict(
    grading: GradingRun, answers: ProcessAnswers, execution: ExecResult, *, visible: bool
) -> tuple[Verdict, str] | None:
    """Return the verdict on all tests of a process, or None if each test has its own."""
    if execution.status is ExecStatus.INFRA:
        return verdict_of(execution, grading.limits)
    if not answers.started:
        return grading.never_started(execution)
    if answers.broken:
        grading.signals.add("broken_protocol")
        return Verdict.PROTOCOL, answers.broken
    if answers.loaded:
        return None
    verdict, detail = (Verdict.ERROR, answers.load_error) if answers.load_error else _end_verdict(grading, execution)
    grading.not_loaded = True
    if visible and not grading.load_error:
        grading.load_error = detail
    return verdict, detail


def _end_verdict(grading: GradingRun, execution: ExecResult) -> tuple[Verdict, str]:
    """Return the verdict on the call, or the loading, in which a process ended."""
    verdict, detail = verdict_of(execution, grading.limits)
    if verdict is Verdict.MISSING:
        grading.signals.add("early_exit")
    return verdict, detail


async def _judge(
    grading: GradingRun, suite: FunctionSuite, *, case: _Case, answer: dict[str, Any], num_bytes: int
) -> TestResult:
    """Return the result of a test from the solution's answer, which is one of `num_bytes`."""
    test = case.test
    got = detail = ""
    verdict = Verdict.ERROR
    if "error" in answer:
        detail = shorten(answer["error"]["text"], 2000)
    else:
        try:
            value = await off_loop(num_bytes, decode, answer["value"])
            got = await off_loop(num_bytes, show, value)
            if suite.checker is not None:
                good = run_checker(suite.checker, test.args, test.expected, value)
            else:
                good = await off_loop(num_bytes, same_value, test.expected, value, suite.comparison)
            verdict = Verdict.PASSED if good else Verdict.FAILED
        except CodecError as error:
            verdict, detail = Verdict.PROTOCOL, str(error)
            grading.signals.add("broken_protocol")
        except InfraError as error:
            verdict, detail = Verdict.INFRA, str(error)
            grading.infra_detail = grading.infra_detail or detail
    return _result(case, verdict, detail, got=got)


def _result(case: _Case, verdict: Verdict, detail: str = "", *, got: str = "") -> TestResult:
    """Return the result of a test with the texts that describe it."""
    parts = [show(argument) for argument in case.test.args]
    parts += [f"{key}={show(value)}" for key, value in case.test.kwargs.items()]
    call = shorten(f"{case.entry_point}({', '.join(parts)})")
    return TestResult(case.name, case.visible, verdict, detail, call, show(case.test.expected), got)
