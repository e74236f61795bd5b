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

from agentenv.sandbox.grading.compare import Comparison as Comparison
from agentenv.sandbox.grading.compare import same_value as same_value
from agentenv.sandbox.grading.grader import grade as grade
from agentenv.sandbox.grading.results import GradeResult as GradeResult
from agentenv.sandbox.grading.results import Integrity as Integrity
from agentenv.sandbox.grading.results import TestResult as TestResult
from agentenv.sandbox.grading.results import Verdict as Verdict
from agentenv.sandbox.grading.results import feedback as feedback
from agentenv.sandbox.grading.suites import AssertSuite as AssertSuite
from agentenv.sandbox.grading.suites import AssertTest as AssertTest
from agentenv.sandbox.grading.suites import FunctionSuite as FunctionSuite
from agentenv.sandbox.grading.suites import FunctionTest as FunctionTest
from agentenv.sandbox.grading.suites import PytestSuite as PytestSuite
from agentenv.sandbox.grading.suites import StdioSuite as StdioSuite
from agentenv.sandbox.grading.suites import StdioTest as StdioTest
from agentenv.sandbox.grading.suites import TestSuite as TestSuite
