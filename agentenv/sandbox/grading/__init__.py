"""Graders of untrusted programs: test suites, `grade`, and feedback for the model.

    suite = FunctionSuite("add", hidden=(FunctionTest((1, 2), 3), FunctionTest((0, 0), 0)))
    result = await grade(sandbox, "def add(a, b): return a + b", suite)
    assert result.score == 1.0

| suite | the program | where it is judged | integrity |
|---|---|---|---|
| `StdioSuite` | reads stdin and prints | outside, against an output that never enters the sandbox | `outside` |
| `FunctionSuite` | defines functions | outside, against values that never enter the sandbox | `outside` |
| `AssertSuite` | defines functions | by tests in a second sandbox, without its source | `proxy` |
| `PytestSuite` | is imported by tests | in the same interpreter: evidence, not proof | `in_process` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.sandbox.grading.compare import Comparison, same_value
    from agentenv.sandbox.grading.feedback_text import feedback
    from agentenv.sandbox.grading.grader import grade
    from agentenv.sandbox.grading.results import GradeResult, Integrity, TestResult, Verdict
    from agentenv.sandbox.grading.suites import (
        AssertSuite,
        AssertTest,
        FunctionSuite,
        FunctionTest,
        PytestSuite,
        StdioSuite,
        StdioTest,
        TestSuite,
    )

__all__ = [
    "AssertSuite",
    "AssertTest",
    "Comparison",
    "FunctionSuite",
    "FunctionTest",
    "GradeResult",
    "Integrity",
    "PytestSuite",
    "StdioSuite",
    "StdioTest",
    "TestResult",
    "TestSuite",
    "Verdict",
    "feedback",
    "grade",
    "same_value",
]

_HOMES = {
    "compare": ("Comparison", "same_value"),
    "feedback_text": ("feedback",),
    "grader": ("grade",),
    "results": ("GradeResult", "Integrity", "TestResult", "Verdict"),
    "suites": (
        "AssertSuite",
        "AssertTest",
        "FunctionSuite",
        "FunctionTest",
        "PytestSuite",
        "StdioSuite",
        "StdioTest",
        "TestSuite",
    ),
}
# Imported on first use, because these modules import this package themselves.
__getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names})
