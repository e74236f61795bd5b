"""What a grade says: a verdict per test, how far it can be believed, and no number where the sandbox failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentenv.sandbox.types import Isolation


class Verdict(StrEnum):
    """Of one test."""

    PASSED = "passed"
    """There is positive evidence for it."""
    FAILED = "failed"
    """Another result than the expected one."""
    ERROR = "error"
    """An exception, another exit code than 0, a crash, or a value that is none."""
    TIMEOUT = "timeout"
    """The limit of CPU or wall time, which it had for itself."""
    LIMIT = "limit"
    """The limit of memory, output or disk."""
    MISSING = "missing"
    """The program ended without a result, as by `os._exit(0)`."""
    PROTOCOL = "protocol"
    """What came back contradicts itself, as a forged, doubled or cut line does."""
    SKIPPED = "skipped"
    """Not run, because a test before it did not pass."""
    INFRA = "infra"
    """The sandbox failed: nothing is known."""


class Integrity(StrEnum):
    """What a pass is worth when the program is written to be passed."""

    OUTSIDE = "outside"
    """Judged outside of the sandbox, against expectations that never entered it."""
    PROXY = "proxy"
    """Judged by tests in a second sandbox, which the solution's text never enters."""
    IN_PROCESS = "in_process"
    """Judged in the interpreter that also runs the solution: evidence, no proof."""


class GradeStatus(StrEnum):
    """Whether there is a grade."""

    OK = "ok"
    INFRA = "infra"
    """The sandbox failed for at least one test: the program has no score, which is not a score of 0."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """How one test went. All texts are what the program made of them: untrusted."""

    __test__ = False

    id: str
    """`visible[2]`, `hidden[0]`, or pytest's node id."""
    visible: bool
    """Whether the model may see more of it than a count."""
    verdict: Verdict
    detail: str = ""
    """Why not: an exception with the solution's own frames, a limit, a broken line."""
    shown_input: str = ""
    """The call, the standard input or the test's text, shortened."""
    shown_expected: str = ""
    shown_got: str = ""


@dataclass(frozen=True, slots=True)
class GradeResult:
    """All verdicts of one grading."""

    tests: tuple[TestResult, ...]
    """Every test of the suite, the visible ones first."""
    integrity: Integrity
    tamper_signals: tuple[str, ...] = ()
    """What the program did that no solution needs, sorted. For audits: no verdict depends on one alone."""
    load_error: str = ""
    """Why the solution could not be loaded, from a process that knows no hidden test; empty where it could."""
    infra_detail: str = ""
    """Of the first infra failure: what failed, and what mends it."""
    isolation: Isolation = Isolation.NONE
    """The weakest that any execution had."""
    num_executions: int = 0
    wall_s: float = 0.0
    """Of all executions together; so are `cpu_s` and `queue_s`."""
    cpu_s: float = 0.0
    queue_s: float = 0.0

    def count(self, verdict: Verdict) -> int:
        """How many tests have this verdict."""
        return sum(test.verdict is verdict for test in self.tests)

    @property
    def status(self) -> GradeStatus:
        """`INFRA` where any test is."""
        return GradeStatus.INFRA if self.infra_detail or self.count(Verdict.INFRA) else GradeStatus.OK

    @property
    def score(self) -> float | None:
        """The share of tests that passed, 0 to 1; None where the sandbox failed."""
        return None if self.status is GradeStatus.INFRA else self.count(Verdict.PASSED) / len(self.tests)

    @property
    def all_passed(self) -> bool | None:
        """Whether every test passed; None where the sandbox failed."""
        return None if self.status is GradeStatus.INFRA else self.count(Verdict.PASSED) == len(self.tests)

    def share(self, *, visible: bool) -> float | None:
        """The share of the visible or of the hidden tests that passed; None without such tests or where it failed."""
        tests = [test for test in self.tests if test.visible is visible]
        if not tests or self.status is GradeStatus.INFRA:
            return None
        return sum(test.verdict is Verdict.PASSED for test in tests) / len(tests)
