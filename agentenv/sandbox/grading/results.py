"""The result of grading: a verdict per test, its integrity, and no score if the sandbox failed; and its texts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentenv.sandbox.types import Isolation


class Verdict(StrEnum):
    """The outcome of one test."""

    PASSED = "passed"
    """There is positive evidence that the test passed."""
    FAILED = "failed"
    """The result differs from the expected one."""
    ERROR = "error"
    """An exception, a non-zero exit code, a crash, or a value that cannot be encoded."""
    TIMEOUT = "timeout"
    """The test reached its limit of CPU or wall time."""
    LIMIT = "limit"
    """The test reached its limit of memory, output or disk."""
    MISSING = "missing"
    """The program ended without a result, for example by `os._exit(0)`."""
    PROTOCOL = "protocol"
    """The answers break the protocol, for example by a forged, repeated or truncated line."""
    SKIPPED = "skipped"
    """Not run, because an earlier test did not pass."""
    INFRA = "infra"
    """The sandbox failed; the outcome is unknown."""


class Integrity(StrEnum):
    """The reliability of a pass against a program that tries to cheat."""

    OUTSIDE = "outside"
    """Judged outside the sandbox, against expectations that never enter it."""
    PROXY = "proxy"
    """Judged by tests in a second sandbox, which the solution's source never enters."""
    IN_PROCESS = "in_process"
    """Judged in the interpreter that also runs the solution: evidence, not proof."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of one test. All texts contain output of the program and are untrusted."""

    __test__ = False

    id: str
    """`visible[2]`, `hidden[0]`, or a node id of pytest."""
    visible: bool
    """True if the model may see the result; of hidden tests it sees at most a count."""
    verdict: Verdict
    detail: str = ""
    """Reason of a failure: an exception with the solution's frames, a limit, or a broken line."""
    shown_input: str = ""
    """The call, the standard input or the source of the test, shortened."""
    shown_expected: str = ""
    shown_got: str = ""


@dataclass(frozen=True, slots=True)
class GradeResult:
    """The results of all tests of a suite."""

    tests: tuple[TestResult, ...]
    """Every test of the suite, the visible ones first."""
    integrity: Integrity
    tamper_signals: tuple[str, ...] = ()
    """Suspicious actions of the program, sorted. For audits: no verdict depends on one of them alone."""
    load_error: str = ""
    """Error that prevented loading the solution, from a process without hidden tests; empty if it was loaded."""
    infra_detail: str = ""
    """Reason of the first sandbox failure, and how to fix it."""
    isolation: Isolation = Isolation.NONE
    """Weakest isolation of all executions."""
    num_executions: int = 0

    def count(self, verdict: Verdict) -> int:
        """Return the number of tests with this verdict."""
        return sum(test.verdict is verdict for test in self.tests)

    @property
    def sandbox_failed(self) -> bool:
        """True if the sandbox failed for at least one test. The program has no score then, which differs from 0."""
        return bool(self.infra_detail) or self.count(Verdict.INFRA) > 0

    @property
    def score(self) -> float | None:
        """Share of tests that passed, from 0 to 1; None if the sandbox failed."""
        return None if self.sandbox_failed else self.count(Verdict.PASSED) / len(self.tests)

    @property
    def all_passed(self) -> bool | None:
        """True if every test passed; None if the sandbox failed."""
        return None if self.sandbox_failed else self.count(Verdict.PASSED) == len(self.tests)

    def share(self, *, visible: bool) -> float | None:
        """Return the share of visible or hidden tests that passed; None without such tests or if the sandbox failed."""
        tests = [test for test in self.tests if test.visible is visible]
        if not tests or self.sandbox_failed:
            return None
        return sum(test.verdict is Verdict.PASSED for test in tests) / len(tests)


# --- texts ------------------------------------------------------------------------------------------------------------

_MAX_SHOWN = 500
_NOT_RUN = (Verdict.SKIPPED, Verdict.INFRA)
_FAILURES = {
    Verdict.FAILED: "gave a wrong result",
    Verdict.ERROR: "ended with an error",
    Verdict.TIMEOUT: "took too long",
    Verdict.LIMIT: "went beyond a limit",
    Verdict.MISSING: "gave no result",
    Verdict.PROTOCOL: "gave no valid result",
}


def show(value: Any) -> str:
    """Return the `repr` of a value, shorten and safe to print."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a {type(value).__name__} with an integer that is too long to print"
    return shorten(text)


def shorten(text: str, max_chars: int = _MAX_SHOWN) -> str:
    """Return the beginning and the end of a text, with control characters and lone surrogates escaped."""
    if len(text) > max_chars:
        half = (max_chars - 30) // 2
        text = f"{text[:half]} … ({len(text) - 2 * half} more) … {text[-half:]}"
    return "".join(
        character if character in "\n\t" or character.isprintable() else repr(character)[1:-1] for character in text
    )


def feedback(result: GradeResult, *, max_tests: int = 1, max_chars: int = 2000, hidden_count: bool = True) -> str:
    """Return a text about a grade for the model that wrote the program.

    Args:
        result: the grade.
        max_tests: number of failed visible tests to describe in full.
        max_chars: length limit of the text.
        hidden_count: add how many hidden tests passed.
    """
    if result.sandbox_failed:
        return "The tests could not be run. This says nothing about the program."
    if result.all_passed:
        return "All tests passed."
    if result.load_error:
        return shorten(f"The program could not be loaded.\n{result.load_error}", max_chars)
    parts = [_count_passed(result, visible=True)]
    failed = [test for test in result.tests if test.visible and test.verdict in _FAILURES]
    for test in failed[:max_tests]:
        lines = [f"Test {test.id} {_FAILURES[test.verdict]}."]
        for name, text in (("input", test.shown_input), ("expected", test.shown_expected), ("got", test.shown_got)):
            if text:
                lines.append(f"{name}:\n{text.rstrip()}" if "\n" in text.strip() else f"{name}: {text.strip()}")
        parts.append("\n".join([*lines, test.detail] if test.detail else lines))
    if hidden_count:
        parts.append(_count_passed(result, visible=False))
    text = "\n\n".join(part for part in parts if part)
    return shorten(text or "Not all tests passed.", max_chars)


def _count_passed(result: GradeResult, *, visible: bool) -> str:
    tests = [test for test in result.tests if test.visible is visible and test.verdict not in _NOT_RUN]
    kind = "" if visible else "hidden "
    passed = sum(test.verdict is Verdict.PASSED for test in tests)
    return f"{passed} of {len(tests)} {kind}tests passed." if tests else ""
