"""Graders of programs that do not trust them: test suites, `grade`, and what a model may be told of it.

    suite = FunctionSuite("add", hidden=(FunctionTest((1, 2), 3), FunctionTest((0, 0), 0)))
    result = await grade(sandbox, "def add(a, b): return a + b", suite)
    assert result.score == 1.0

| suite | the program | its result is judged | integrity |
|---|---|---|---|
| `StdioSuite` | reads stdin, prints | outside, against an output that never enters | `outside` |
| `FunctionSuite` | defines functions | outside, against values that never enter | `outside` |
| `AssertSuite` | defines functions | by tests in a second sandbox that never see its text | `proxy` |
| `PytestSuite` | is imported by tests | beside it, in one interpreter: evidence, no proof | `in_process` |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentenv.sandbox.grading._feedback import feedback
    from agentenv.sandbox.grading._grade import grade
    from agentenv.sandbox.grading.compare import Comparison, same_value
    from agentenv.sandbox.grading.results import GradeResult, GradeStatus, Integrity, TestResult, Verdict
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
    "GradeStatus",
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
    "_feedback": ("feedback",),
    "_grade": ("grade",),
    "results": ("GradeResult", "GradeStatus", "Integrity", "TestResult", "Verdict"),
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


def __getattr__(name: str) -> object:
    # When first asked for: its modules import this package themselves.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
