"""Grading of AssertSuite: tests run in one sandbox, the solution in another, and their calls are relayed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from agentenv._util.calls import MAX_GIVEN_BACK
from agentenv._util.off_loop import off_loop
from agentenv.errors import DataError, InfraError
from agentenv.sandbox.grading.codec import CodecError, decode, dump_line, parse_line
from agentenv.sandbox.grading.executions import GradingRun, guest_program, verdict_of
from agentenv.sandbox.grading.guest.asserts import NO_CALL
from agentenv.sandbox.grading.results import TestResult, Verdict, shorten, show
from agentenv.sandbox.grading.suites import AssertSuite, AssertTest
from agentenv.sandbox.local.execution import CROWDED
from agentenv.sandbox.types import ExecStatus, Execution, Sandbox

_MAX_BLAMED = 3
_BACKSTOP_S = 60.0
_STARTING: WeakKeyDictionary[Sandbox, asyncio.Lock] = WeakKeyDictionary()
"""Only one pair of sandboxes starts at a time. Pairs that each held one slot and waited for another would deadlock."""


@dataclass(slots=True)
class _PairOutcome:
    """The outcome of tests in one pair of sandboxes."""

    verdicts: list[tuple[Verdict, str, str]] = field(default_factory=list)
    """(verdict, detail, last call with its result) of the first tests."""
    died: bool = False
    """True if a process ended in the last of them."""
    whole: tuple[Verdict, str] | None = None
    """The verdict on all tests of the pair, if there is only one."""
    load_error: str = ""


async def grade_asserts(grading: GradingRun, code: str, suite: AssertSuite, *, visible: bool) -> list[TestResult]:
    """Return a result per visible or hidden test, which never share a sandbox.

    Raises:
        DataError: a test passes without a call of the solution, so no program passes all. No program can cause this.
    """
    results: list[TestResult] = []
    kind, tests = ("visible", suite.visible) if visible else ("hidden", suite.hidden)
    verdicts = await _grade_tests(grading, code, suite=suite, tests=tests)
    for index, (test, (verdict, detail, call)) in enumerate(zip(tests, verdicts, strict=True)):
        texts = {"detail": shorten(detail, 2000), "shown_input": shorten(test.source, 2000), "shown_got": call}
        results.append(TestResult(f"{kind}[{index}]", visible, verdict, **texts))
    empty = [result for result in results if (result.verdict, result.detail) == (Verdict.MISSING, NO_CALL)]
    if empty:
        raise DataError(
            f"AssertSuite: expected tests that call {' or '.join(suite.names)}, got {empty[0].shown_input!r:.200}. "
            "Correct or remove the test."
        )
    return results


async def _grade_tests(
    grading: GradingRun, code: str, *, suite: AssertSuite, tests: Sequence[AssertTest]
) -> list[tuple[Verdict, str, str]]:
    """Return the verdicts of visible or of hidden tests.

    If a process ends in a test that was not its first, that test is repeated in a fresh pair of sandboxes.
    """
    done: list[tuple[Verdict, str, str]] = []
    blamed, alone = 0, False
    while len(done) < len(tests):
        if (late := grading.out_of_time()) is not None:
            return done + [(*late, "")] * (len(tests) - len(done))
        detail = grading.infra_detail
        try:
            async with grading.turn(alone=alone):
                outcome = await _examine_pair(grading, code, suite=suite, tests=tests[len(done) :])
        except InfraError as error:
            if "host:" in str(error) and not alone:
                # Once more without others, whose programs may have taken what the host has.
                alone, grading.infra_detail = True, detail
                continue
            grading.infra_detail = grading.infra_detail or str(error)
            outcome = _PairOutcome(whole=(Verdict.INFRA, str(error)))
        if not alone and any(result.detail == CROWDED for result in grading.results[-2:]):
            alone = True
            continue
        grading.load_error = grading.load_error or outcome.load_error  # from a process that has seen no test
        if outcome.whole is not None:
            return done + [(*outcome.whole, "")] * (len(tests) - len(done))
        if outcome.died and len(outcome.verdicts) > 1:
            outcome.verdicts.pop()
        elif outcome.died:
            blamed += 1
        done += outcome.verdicts
        failed = any(verdict is not Verdict.PASSED for verdict, _, _ in done)
        if blamed == _MAX_BLAMED or (grading.stop_on_fail and failed):
            verdict = Verdict.SKIPPED if grading.stop_on_fail else Verdict.MISSING
            done += [(verdict, "not run", "")] * (len(tests) - len(done))
    return done


async def _examine_pair(
    grading: GradingRun, code: str, *, suite: AssertSuite, tests: Sequence[AssertTest]
) -> _PairOutcome:
    """Run tests in a fresh pair of sandboxes.

    Raises:
        InfraError: the sandbox failed.
    """
    limits = replace(grading.limits, wall_s=2 * grading.limits.wall_s + _BACKSTOP_S)
    started: list[Execution] = []
    try:
        async with _STARTING.setdefault(grading.sandbox, asyncio.Lock()):
            program = guest_program("codec.py", "guest/serve.py", "guest/asserts.py", entry="examine()")
            started.append(await grading.start(program, limits=limits))
            program = guest_program("codec.py", "guest/serve.py", entry="serve(3)")
            started.append(await grading.start(program, limits=grading.limits))
        relay = _Relay(grading, *started)
        async with asyncio.timeout((1 + MAX_GIVEN_BACK) * limits.wall_s + _BACKSTOP_S):
            return await relay.examine(code, suite, tests)
    except CodecError as error:
        raise InfraError(
            f"the tests' sandbox: expected a message, got {error}. Correct the tests: descriptor 3 is not theirs."
        ) from error
    except TimeoutError as error:
        raise InfraError(
            f"sandbox: expected the end of an execution within its limit of {limits.wall_s:g} s, got none."
        ) from error
    finally:
        for execution in started:
            result = await execution.kill()
            # They take turns: their time counts once.
            grading.results.append(result if execution is started[0] else replace(result, wall_s=0.0))


class _MessageReader:
    """A reader of the messages of one execution."""

    def __init__(self, execution: Execution, max_bytes: int) -> None:
        self._execution = execution
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self.line = b""
        """The last message."""
        self.waited_s = 0.0
        """Time in which the execution owed a message, without the time that parsing it took."""

    async def message(self) -> dict[str, Any] | None:
        """Return the next message, or None once the execution has ended.

        Raises:
            CodecError: the output is not a message.
        """
        num_searched = 0
        while (end := self._buffer.find(b"\n", num_searched)) < 0:
            num_searched = len(self._buffer)
            if num_searched > self._max_bytes:
                raise CodecError("a line that is too long")
            started = time.monotonic()
            chunk = await self._execution.receive()
            self.waited_s += time.monotonic() - started
            if not chunk:
                return None
            self._buffer += chunk
        self.line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return await off_loop(end, parse_line, self.line)


class _Relay:
    """A relay of calls from the tests to the solution, and of their results."""

    def __init__(self, grading: GradingRun, examiner: Execution, solver: Execution) -> None:
        self._grading = grading
        self._examiner = examiner
        self._solver = solver
        # Calls are as large as the codec allows, because the tests may make them of the solution's values.
        self._questions = _MessageReader(examiner, sys.maxsize)
        self._answers = _MessageReader(solver, grading.limits.channel_kb * 1024)
        self._started = time.monotonic()
        self._fault: tuple[Verdict, str] | None = None
        """Verdict of a failure of the solution's process, which applies to all later tests."""
        self._last_call = ""

    async def examine(self, code: str, suite: AssertSuite, tests: Sequence[AssertTest]) -> _PairOutcome:
        """Load the solution and run the tests."""
        header = {
            "code": code,
            "prelude": suite.solution_prelude,
            "names": list(suite.names),
            "max_bytes": self._grading.limits.channel_kb * 1024,
        }
        await self._solver.send(dump_line(header))
        if await self._answer() != {"begin": True}:
            raise InfraError(self._grading.never_started(await self._solver.finish())[1])
        match await self._answer():
            case {"ready": True, **rest} if not rest:
                pass
            case {"load_error": {"text": str(text)}}:
                await self._close()
                return _PairOutcome(whole=(Verdict.ERROR, text), load_error=text)
            case None:
                fault = self._fault or (Verdict.ERROR, "")
                return _PairOutcome(whole=fault, load_error=fault[1])
            case _:
                return _PairOutcome(whole=self._forged("an unexpected first line"))
        request = {
            "names": list(suite.names),
            "prelude": suite.prelude,
            "tests": [test.source for test in tests],
            "stop": self._grading.stop_on_fail,
        }
        await self._examiner.send(dump_line(request))
        return await self._relay(len(tests))

    async def _relay(self, num_tests: int) -> _PairOutcome:
        outcome = _PairOutcome()
        while True:
            message = await self._questions.message()
            match message:
                case None:
                    outcome.verdicts.append(await self._end_verdict())
                    outcome.died = True
                    return outcome
                case {"begin": int()}:
                    self._last_call = ""
                case {"id": int()}:
                    await self._examiner.send(await self._call(message))
                case {"test": int(index), "verdict": str(verdict), "detail": str(detail)}:
                    if index != len(outcome.verdicts) or index >= num_tests:
                        raise InfraError(f"the tests' sandbox: expected the verdict of another test, got {index}.")
                    outcome.verdicts.append((*(self._fault or (Verdict(verdict), detail)), self._last_call))
                case {"end": True}:
                    break
        outcome.died = self._fault is not None  # at the end, all calls have been answered
        if self._fault is None:
            await self._close()
        if self._fault is not None and self._fault[0] is Verdict.PROTOCOL:
            outcome.whole = self._fault
        if not outcome.verdicts:
            raise InfraError("the tests' sandbox: expected a verdict, got none.")
        return outcome

    async def _end_verdict(self) -> tuple[Verdict, str, str]:
        """Return the verdict on a test in which the tests' process ended."""
        if self._fault is not None:  # it was ended with the solution's
            return (*self._fault, self._last_call)
        result = await self._examiner.finish()
        ended, detail = verdict_of(result, self._grading.limits)
        if ended is Verdict.INFRA:
            raise InfraError(f"the tests' sandbox failed: {detail}")
        return ended, f"the test itself: {detail}", self._last_call  # because of a slow or large value

    async def _call(self, request: dict[str, Any]) -> bytes:
        """Call the solution and return the answer for the tests, as it came."""
        question = self._questions.line
        await self._solver.send(question)
        answer = await self._answer()
        try:
            args = await off_loop(len(question), lambda: ", ".join(map(show, decode(request["args"]))))
        except CodecError as error:  # of the solution's values; its process refuses them too
            args = show(error)
        self._last_call = shorten(f"{request['name']}({args})")
        if answer is None:
            return dump_line({"gone": self._fault[1] if self._fault else "the solution's process is gone"})
        number = answer.pop("id", None)
        if type(number) is not int or number != request["id"]:
            self._fault = self._forged("an answer to another call")
        elif answer.keys() == {"value"}:
            try:
                value = await off_loop(len(self._answers.line), lambda: show(decode(answer["value"])))
                self._last_call += f" returned {value}"
                return self._answers.line
            except CodecError as error:
                self._fault = self._forged(str(error))
        elif answer.keys() == {"error"} and isinstance(answer["error"], dict):
            self._last_call += shorten(f" raised\n{answer['error'].get('text')}", 2000)
            return self._answers.line
        else:
            self._fault = self._forged(f"an answer with the keys {sorted(answer)[:4]!r}")
        return dump_line({"gone": self._fault[1]})

    async def _answer(self) -> dict[str, Any] | None:
        """Return the solution's next message; None after a fault, which is kept in `_fault`."""
        try:
            message = await self._answers.message()
        except CodecError as error:
            self._fault = self._forged(str(error))
            return None
        if message is not None:
            return message
        result = await self._solver.finish()
        limits = self._grading.limits
        if result.status is ExecStatus.WALL_TIMEOUT and await self._tests_took_most():
            raise InfraError(f"the tests themselves took most of wall_s = {limits.wall_s:g} s. Raise it.")
        verdict, detail = verdict_of(result, limits)
        if verdict is Verdict.INFRA:
            raise InfraError(detail or "the sandbox failed")
        if result.status is ExecStatus.POLICY:
            self._grading.signals.add("forbidden_system_call")
        if verdict is Verdict.MISSING:
            self._grading.signals.add("early_exit")
        self._fault = verdict, detail
        return None

    async def _tests_took_most(self) -> bool:
        """Return True if the tests kept a solution waiting for most of its time.

        All other time is the solution's, such as that for handling its values. The CPU time of the tests may be due to
        these too, and so may the time for which they waited for a core; both are known once their process has ended.
        """
        own_s = 0.5 * self._grading.limits.wall_s
        solution_s = time.monotonic() - self._started - self._questions.waited_s
        if solution_s >= own_s:
            return False
        tests = await self._examiner.kill()
        return solution_s + tests.cpu_s + tests.run_delay_s < own_s

    def _forged(self, why: str) -> tuple[Verdict, str]:
        self._grading.signals.add("broken_protocol")
        return Verdict.PROTOCOL, why

    async def _close(self) -> None:
        """Read the solution's last line and check that no other follows."""
        await self._solver.send(dump_line({"end": True}))
        match await self._answer():
            case {"end": True, "signals": [*signals], **rest} if not rest:
                self._grading.signals.update(str(signal)[:40] for signal in signals[:16])
            case None:
                return
            case _:
                self._fault = self._forged("an unexpected line")
                return
        try:
            more = await self._answers.message()
        except CodecError:
            more = {}
        if more is not None:
            self._fault = self._forged("a line after the last one")
