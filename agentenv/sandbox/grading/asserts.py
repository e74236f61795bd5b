"""R3: tests as asserts, in a sandbox that the solution's text never enters; its calls are relayed from here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from agentenv.errors import InfraError
from agentenv.sandbox.grading._bench import Bench, inside, shortened, shown, verdict_of
from agentenv.sandbox.grading._codec import CodecError, decode, dump_line, parse_line
from agentenv.sandbox.grading.results import TestResult, Verdict
from agentenv.sandbox.grading.suites import AssertSuite, AssertTest
from agentenv.sandbox.types import ExecResult, Execution, Sandbox, Status

_MAX_BLAMED = 3
_BACKSTOP_S = 60.0
_STARTING: WeakKeyDictionary[Sandbox, asyncio.Lock] = WeakKeyDictionary()
"""One pair at a time waits for its two places: pairs that each held one and waited for another would wait for ever."""


@dataclass(slots=True)
class _Outcome:
    """What a pair of sandboxes said of the tests that it was given."""

    verdicts: list[tuple[Verdict, str, str]] = field(default_factory=list)
    """(verdict, why, the last call and what it gave) of the first tests."""
    died: bool = False
    """Whether the last of them is a process's end."""
    whole: tuple[Verdict, str] | None = None
    """The verdict on all tests that the pair was given."""
    load_error: str = ""


async def grade_asserts(bench: Bench, code: str, suite: AssertSuite) -> list[TestResult]:
    """A verdict per test, the visible ones first; the two kinds never share a sandbox."""
    results: list[TestResult] = []
    for kind, tests in (("visible", suite.visible), ("hidden", suite.hidden)):
        verdicts: list[tuple[Verdict, str, str]] = []
        failed = {result.verdict for result in results} - {Verdict.PASSED}
        if bench.stop_on_fail and failed:
            verdict = Verdict.INFRA if Verdict.INFRA in failed else Verdict.SKIPPED
            verdicts = [(verdict, "", "")] * len(tests)
        elif tests:
            verdicts = await _graded(bench, code, suite=suite, tests=tests)
        results += [
            TestResult(
                f"{kind}[{index}]",
                kind == "visible",
                verdict,
                detail=shortened(detail, 2000),
                shown_input=shortened(test.source, 2000),
                shown_got=call,
            )
            for index, (test, (verdict, detail, call)) in enumerate(zip(tests, verdicts, strict=True))
        ]
    return results


async def _graded(
    bench: Bench, code: str, *, suite: AssertSuite, tests: Sequence[AssertTest]
) -> list[tuple[Verdict, str, str]]:
    """The verdicts of tests of one kind; a test that ends a pair which others used before has a fresh one."""
    done: list[tuple[Verdict, str, str]] = []
    blamed = 0
    while len(done) < len(tests):
        try:
            outcome = await _examined(bench, code, suite=suite, tests=tests[len(done) :])
        except InfraError as error:
            bench.infra_detail = bench.infra_detail or str(error)
            outcome = _Outcome(whole=(Verdict.INFRA, str(error)))
        bench.load_error = bench.load_error or outcome.load_error  # it knew no test yet
        if outcome.whole is not None:
            return done + [(*outcome.whole, "")] * (len(tests) - len(done))
        if outcome.died and len(outcome.verdicts) > 1:
            outcome.verdicts.pop()
        elif outcome.died:
            blamed += 1
        done += outcome.verdicts
        failed = any(verdict is not Verdict.PASSED for verdict, _, _ in done)
        if blamed == _MAX_BLAMED or (bench.stop_on_fail and failed):
            verdict = Verdict.SKIPPED if bench.stop_on_fail else Verdict.MISSING
            done += [(verdict, "not run", "")] * (len(tests) - len(done))
    return done


async def _examined(bench: Bench, code: str, *, suite: AssertSuite, tests: Sequence[AssertTest]) -> _Outcome:
    """What a fresh pair of sandboxes says.

    Raises:
        InfraError: the sandbox failed.
    """
    limits = replace(bench.limits, wall_s=2 * bench.limits.wall_s + _BACKSTOP_S)
    started: list[Execution] = []
    try:
        async with _STARTING.setdefault(bench.sandbox, asyncio.Lock()):
            started.append(
                await bench.start(
                    inside("_codec.py", "_serve.py", "_asserts.py", entry="examine()"), limits=limits, exact=True
                )
            )
            started.append(await bench.start(inside("_codec.py", "_serve.py", entry="serve(3)"), limits=bench.limits))
        relay = _Relay(bench, *started)
        async with asyncio.timeout(limits.wall_s + _BACKSTOP_S):
            return await relay.examine(code, suite, tests)
    except TimeoutError as error:
        raise InfraError(
            f"sandbox: expected the end of an execution within its limit of {limits.wall_s:g} s, got none."
        ) from error
    finally:
        for execution in started:
            bench.results.append(await execution.kill())


class _Reader:
    """Messages of one side."""

    def __init__(self, execution: Execution, max_bytes: int) -> None:
        self._execution = execution
        self._max_bytes = max_bytes
        self._buffer = b""

    async def message(self) -> dict[str, Any] | None:
        """The next one, None once the side has ended.

        Raises:
            CodecError: what it wrote is no message.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > self._max_bytes:
                raise CodecError("a line that is too long")
            chunk = await self._execution.receive()
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return parse_line(line)


class _Relay:
    """Carries calls from the tests to the solution, and what they gave back."""

    def __init__(self, bench: Bench, examiner: Execution, solver: Execution) -> None:
        self._bench = bench
        self._examiner, self._solver = examiner, solver
        max_bytes = bench.limits.channel_kb * 1024
        self._questions, self._answers = _Reader(examiner, max_bytes), _Reader(solver, max_bytes)
        self._waited_s = 0.0
        self._fault: tuple[Verdict, str] | None = None
        """What became of the solution's side; no test after it has a verdict of its own."""
        self._last_call = ""

    async def examine(self, code: str, suite: AssertSuite, tests: Sequence[AssertTest]) -> _Outcome:
        """Load the solution, then let the tests run."""
        header = {
            "code": code,
            "prelude": suite.solution_prelude,
            "max_bytes": self._bench.limits.channel_kb * 1024 // 4,
        }
        await self._solver.send(dump_line(header))
        if await self._answer() != {"begin": True}:
            raise InfraError(self._bench.never_began(await self._solver.finish())[1])
        match await self._answer():
            case {"ready": True, **rest} if not rest:
                pass
            case {"load_error": {"text": str(text)}}:
                await self._close()
                return _Outcome(whole=(Verdict.ERROR, text), load_error=text)
            case None:
                fault = self._fault or (Verdict.ERROR, "")
                return _Outcome(whole=fault, load_error=fault[1])
            case _:
                return _Outcome(whole=self._forged("a first line that is another"))
        await self._examiner.send(
            dump_line(
                {
                    "names": list(suite.names),
                    "prelude": suite.prelude,
                    "tests": [test.source for test in tests],
                    "stop": self._bench.stop_on_fail,
                    "in_place": suite.in_place,
                }
            )
        )
        return await self._relay(len(tests))

    async def _relay(self, num_tests: int) -> _Outcome:
        outcome = _Outcome()
        while True:
            message = await self._question()
            match message:
                case None:
                    outcome.verdicts.append((*await self._examiner_ended(), self._last_call))
                    outcome.died = True
                    return outcome
                case {"begin": int()}:
                    self._last_call = ""
                case {"id": int()}:
                    await self._examiner.send(dump_line(await self._called(message)))
                case {"test": int(index), "verdict": str(verdict), "detail": str(detail)}:
                    if index != len(outcome.verdicts) or index >= num_tests:
                        raise InfraError(f"the tests' sandbox: expected the verdict of another test, got {index}.")
                    found = self._fault or (Verdict(verdict), detail)
                    outcome.verdicts.append((*found, self._last_call))
                case {"end": True}:
                    break
        if self._fault is None:
            await self._close()
        if self._fault is not None:
            outcome.whole = self._fault if self._fault[0] is Verdict.PROTOCOL else None
            outcome.died = True
        if not outcome.verdicts:
            raise InfraError("the tests' sandbox: expected a verdict, got none.")
        return outcome

    async def _question(self) -> dict[str, Any] | None:
        try:
            return await self._questions.message()
        except CodecError as error:
            raise InfraError(
                f"the tests' sandbox: expected a message, got {error}. Give it smaller values or a larger channel_kb."
            ) from error

    async def _examiner_ended(self) -> tuple[Verdict, str]:
        """The verdict on the test in which the tests' own process ended: a value made it too slow or too large."""
        result = await self._examiner.finish()
        verdict, detail = verdict_of(result, self._bench.limits)
        if verdict is Verdict.INFRA:
            raise InfraError(detail or "the tests' sandbox failed")
        return verdict, f"the test itself: {detail}"

    async def _called(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the tests are told of a call."""
        await self._solver.send(dump_line(request))
        answer = await self._answer()
        self._last_call = shortened(f"{request['name']}({', '.join(shown(decode(each)) for each in request['args'])})")
        if answer is None:
            return {"gone": self._fault[1] if self._fault else "it is gone"}
        number = answer.pop("id", None)
        allowed = {"value", "args"} if request["in_place"] else {"value"}
        if type(number) is not int or number != request["id"]:
            self._fault = self._forged("an answer to another call")
        elif "value" in answer and answer.keys() <= allowed:
            try:
                self._last_call += f" returned {shown(decode(answer['value']))}"
                return answer
            except CodecError as error:
                self._fault = self._forged(str(error))
        elif answer.keys() == {"error"} and isinstance(answer["error"], dict):
            self._last_call += shortened(f" raised\n{answer['error'].get('text')}", 2000)
            return answer
        else:
            self._fault = self._forged(f"an answer with the keys {sorted(answer)[:4]!r}")
        return {"gone": self._fault[1]}

    async def _answer(self) -> dict[str, Any] | None:
        """The solution's next message; None when there is a fault instead."""
        begun = time.monotonic()
        try:
            message = await self._answers.message()
        except CodecError as error:
            self._fault = self._forged(str(error))
            return None
        finally:
            self._waited_s += time.monotonic() - begun
        if message is None:
            self._fault = self._solver_ended(await self._solver.finish())
        return message

    def _solver_ended(self, result: ExecResult) -> tuple[Verdict, str]:
        limits = self._bench.limits
        if result.status is Status.WALL_TIMEOUT and self._waited_s < 0.5 * limits.wall_s:
            raise InfraError(f"the tests took most of wall_s = {limits.wall_s:g} s themselves. Raise it.")
        verdict, detail = verdict_of(result, limits)
        if verdict is Verdict.INFRA:
            raise InfraError(detail or "the sandbox failed")
        if result.status is Status.POLICY:
            self._bench.signals.add("forbidden_system_call")
        if verdict is Verdict.MISSING:
            self._bench.signals.add("early_exit")
        return verdict, detail

    def _forged(self, why: str) -> tuple[Verdict, str]:
        self._bench.signals.add("broken_protocol")
        return Verdict.PROTOCOL, why

    async def _close(self) -> None:
        """Hear the solution's last line, after which there may be none."""
        await self._solver.send(dump_line({"end": True}))
        match await self._answer():
            case {"end": True, "signals": [*signals], **rest} if not rest:
                self._bench.signals.update(str(signal)[:40] for signal in signals[:16])
            case None:
                return
            case _:
                self._fault = self._forged("a line that nobody asked for")
                return
        try:
            more = await self._answers.message()
        except CodecError:
            more = {}
        if more is not None:
            self._fault = self._forged("a line after the last one")
