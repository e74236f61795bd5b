"""R2: functions. Arguments go in, values come out as JSON, and are compared here with what never entered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.errors import InfraError
from agentenv.sandbox.grading._bench import Bench, inside, shortened, shown, side_by_side, verdict_of
from agentenv.sandbox.grading._codec import CodecError, decode, dump_line, encode, parse_line
from agentenv.sandbox.grading._judge import checked
from agentenv.sandbox.grading.compare import same_value
from agentenv.sandbox.grading.results import TestResult, Verdict
from agentenv.sandbox.grading.suites import FunctionSuite, FunctionTest
from agentenv.sandbox.types import ExecResult, Status

_MAX_BLAMED = 3
"""Tests of a batch that may each end a process; the ones after are missing."""


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    visible: bool
    test: FunctionTest
    entry_point: str


@dataclass(slots=True)
class Answers:
    """What a process said, as far as it said it by the protocol."""

    begun: bool = False
    """Whether it came as far as to the solution; what happened before is the sandbox's."""
    loaded: bool = False
    load_error: str = ""
    by_id: dict[int, dict[str, Any]] = field(default_factory=dict)
    signals: tuple[str, ...] = ()
    ended: bool = False
    broken: str = ""
    """Why none of it counts."""


def read_answers(channel: bytes, num_calls: int, *, complete: bool) -> Answers:
    """The answers of one process: one line per call and in their order; anything else breaks the protocol.

    Args:
        channel: what the process wrote.
        num_calls: how many it was asked for.
        complete: whether it ended by itself, so that its last line must have its end.
    """
    *lines, rest = channel.split(b"\n")
    answers = Answers()
    try:
        for line in lines:
            _take(answers, parse_line(line), num_calls)
        if rest and (complete or answers.ended):
            raise CodecError("a line without its end")
    except CodecError as error:
        answers.broken = str(error)
    return answers


def _take(answers: Answers, message: dict[str, Any], num_calls: int) -> None:
    """Add one line."""
    match message:
        case _ if answers.ended:
            raise CodecError("a line after the last one")
        case {"begin": True} if len(message) == 1 and not answers.begun:
            answers.begun = True
        case _ if not answers.begun:
            raise CodecError("a line before the first one")
        case {"ready": True} if len(message) == 1 and not answers.loaded and not answers.load_error:
            answers.loaded = True
        case {"load_error": {"text": str(text)}} if not answers.loaded and not answers.load_error:
            answers.load_error = text or "it could not be loaded"
        case {"end": True, "signals": [*signals]} if len(message) == 2 and all(isinstance(one, str) for one in signals):
            answers.ended, answers.signals = True, tuple(str(one)[:40] for one in signals[:16])
        case {"id": int(number), "value": _} | {"id": int(number), "error": {"text": str()}} if (
            answers.loaded and len(message) == 2 and type(number) is int and number == len(answers.by_id) < num_calls
        ):
            answers.by_id[number] = message
        case _:
            raise CodecError(f"a line that nobody asked for, with the keys {sorted(message)[:4]!r}")


async def grade_functions(bench: Bench, code: str, suite: FunctionSuite) -> list[TestResult]:
    """A verdict per test, the visible ones first; the two kinds never share a process."""
    entry = suite.entry_point
    visible = [_Case(f"visible[{index}]", True, test, entry) for index, test in enumerate(suite.visible)]
    hidden = [_Case(f"hidden[{index}]", False, test, entry) for index, test in enumerate(suite.hidden)]
    size = suite.batch
    batches = [cases[start : start + size] for cases in (visible, hidden) for start in range(0, len(cases), size)]
    if bench.stop_on_fail:
        results = await _until_failure(bench, code, suite=suite, batches=batches)
    else:
        done = await side_by_side([_graded(bench, code, suite=suite, cases=cases) for cases in batches])
        results = [result for each in done for result in each]
    if bench.not_loaded and not suite.visible:
        # Why may be told, but not by a process that knows hidden tests: it could tell those.
        execution, answers = await _asked(bench, code, suite, ())
        _whole_batch(bench, answers, execution, visible=True)
    return results


async def _until_failure(
    bench: Bench, code: str, *, suite: FunctionSuite, batches: Sequence[Sequence[_Case]]
) -> list[TestResult]:
    """The verdicts of one batch after the other, up to the first that holds a failure."""
    results: list[TestResult] = []
    for cases in batches:
        if any(result.verdict is not Verdict.PASSED for result in results):
            infra = any(result.verdict is Verdict.INFRA for result in results)
            results += [_unanswered(case, Verdict.INFRA if infra else Verdict.SKIPPED) for case in cases]
        else:
            results += await _graded(bench, code, suite=suite, cases=cases)
    return results


async def _graded(bench: Bench, code: str, *, suite: FunctionSuite, cases: Sequence[_Case]) -> list[TestResult]:
    """The verdicts of one batch.

    A process may end before its last call. The call it was in came after others, which have used its limits up or left
    something behind: so that call comes first in the next process, and is blamed only if that one ends in it too.
    """
    results: list[TestResult] = []
    blamed = 0
    while len(results) < len(cases):
        pending = cases[len(results) :]
        execution, answers = await _asked(bench, code, suite, pending)
        whole = _whole_batch(bench, answers, execution, visible=cases[0].visible)
        if whole is not None:
            return results + [_unanswered(case, *whole) for case in pending]
        results += [
            _judged(bench, suite, case=case, answer=answers.by_id[index])
            for index, case in enumerate(pending[: len(answers.by_id)])
        ]
        if not answers.by_id:
            results.append(_unanswered(pending[0], *_ended(bench, execution)))
            blamed += 1
        failed = any(result.verdict is not Verdict.PASSED for result in results)
        if blamed == _MAX_BLAMED or (bench.stop_on_fail and failed):
            verdict = Verdict.SKIPPED if bench.stop_on_fail else Verdict.MISSING
            results += [_unanswered(case, verdict, "not run") for case in cases[len(results) :]]
    return results


async def _asked(bench: Bench, code: str, suite: FunctionSuite, cases: Sequence[_Case]) -> tuple[ExecResult, Answers]:
    """One process, and what it said."""
    limits = replace(bench.limits, stdout_kb=max(bench.limits.stdout_kb, bench.limits.channel_kb))
    program = inside("_codec.py", "_serve.py", entry="serve(0)")
    execution = await bench.run(program, stdin=_payload(bench, code, suite, cases), limits=limits, channel=True)
    said = execution.channel or execution.stdout.encode(errors="replace")  # a backend may have no channel
    complete = execution.status is Status.OK and len(said) < bench.limits.channel_kb * 1024
    answers = read_answers(said, len(cases), complete=complete)
    bench.signals.update(answers.signals)
    return execution, answers


def _payload(bench: Bench, code: str, suite: FunctionSuite, cases: Sequence[_Case]) -> bytes:
    """The solution and the calls, one line each."""
    header = {"code": code, "prelude": suite.prelude, "max_bytes": bench.limits.channel_kb * 1024 // 4}
    calls = [
        {
            "id": index,
            "name": suite.entry_point,
            "args": encode(list(case.test.args)),
            "kwargs": encode(dict(case.test.kwargs)),
        }
        for index, case in enumerate(cases)
    ]
    return b"".join(dump_line(message) for message in (header, *calls, {"end": True}))


def _whole_batch(bench: Bench, answers: Answers, execution: ExecResult, *, visible: bool) -> tuple[Verdict, str] | None:
    """The verdict on a process that no single test explains."""
    if execution.status is Status.INFRA:
        return verdict_of(execution, bench.limits)
    if not answers.begun:
        return bench.never_began(execution)
    if answers.broken:
        bench.signals.add("broken_protocol")
        return Verdict.PROTOCOL, answers.broken
    if answers.loaded:
        return None
    verdict, detail = (Verdict.ERROR, answers.load_error) if answers.load_error else _ended(bench, execution)
    bench.not_loaded = True
    if visible and not bench.load_error:
        bench.load_error = detail
    return verdict, detail


def _ended(bench: Bench, execution: ExecResult) -> tuple[Verdict, str]:
    """The verdict on the call, or the loading, in which a process ended."""
    verdict, detail = verdict_of(execution, bench.limits)
    if verdict is Verdict.MISSING:
        bench.signals.add("early_exit")
    return verdict, detail


def _judged(bench: Bench, suite: FunctionSuite, *, case: _Case, answer: dict[str, Any]) -> TestResult:
    """The verdict on an answer."""
    test, got = case.test, ""
    verdict, detail = Verdict.ERROR, ""
    if "error" in answer:
        detail = shortened(answer["error"]["text"], 2000)
    else:
        try:
            value = decode(answer["value"])
            got = shown(value)
            if suite.checker is not None:
                good = checked(suite.checker, test.args, test.expected, value)
            else:
                good = same_value(test.expected, value, suite.comparison)
            verdict = Verdict.PASSED if good else Verdict.FAILED
        except CodecError as error:
            verdict, detail = Verdict.PROTOCOL, str(error)
            bench.signals.add("broken_protocol")
        except InfraError as error:
            verdict, detail = Verdict.INFRA, str(error)
            bench.infra_detail = bench.infra_detail or detail
    return _unanswered(case, verdict, detail, got=got)


def _unanswered(case: _Case, verdict: Verdict, detail: str = "", *, got: str = "") -> TestResult:
    """A test's result with the texts that describe it."""
    parts = [shown(argument) for argument in case.test.args]
    parts += [f"{key}={shown(value)}" for key, value in case.test.kwargs.items()]
    return TestResult(
        case.name,
        case.visible,
        verdict,
        detail=detail,
        shown_input=shortened(f"{case.entry_point}({', '.join(parts)})"),
        shown_expected=shown(case.test.expected),
        shown_got=got,
    )
