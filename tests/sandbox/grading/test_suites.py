"""A suite that cannot be graded is refused when it is made."""

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.grading import (
    AssertSuite,
    AssertTest,
    FunctionSuite,
    FunctionTest,
    PytestSuite,
    StdioSuite,
    StdioTest,
)

IT = ("test.py::test_it",)


def asserts(names):
    return AssertSuite(names, hidden=(AssertTest("f()"),))


def in_process(**options):
    return PytestSuite({"test.py": b"def test_it(): pass\n"}, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FunctionSuite("f"), "expected at least one test"),
        (lambda: FunctionSuite("f", hidden=[FunctionTest((1,), 1)]), "expected a tuple of tests"),
        (lambda: FunctionSuite("f()", hidden=(FunctionTest((1,), 1),)), "expected the name of a function"),
        (lambda: FunctionSuite("f", hidden=(FunctionTest((1,), 1),), batch=0), "expected 1 or more"),
        (lambda: FunctionTest([1], 1), "expected a tuple"),
        (lambda: AssertSuite(("f",), hidden=("assert f(1)",)), "AssertSuite.hidden: expected items of type AssertTest"),
        (lambda: StdioSuite(hidden=(StdioTest("", ""),), mode="fuzzy"), "expected one of exact, lines, tokens, floats"),
        (lambda: asserts(()), "expected a tuple of function names"),
        (lambda: asserts(("a b",)), "expected a tuple of function names"),
        (lambda: in_process(visible=(1,)), "PytestSuite.visible: expected items of type str, got 1. Use node ids."),
        (lambda: in_process(), "at least one test"),
        (lambda: in_process(hidden=("other.py::test_it",)), "node ids in its files"),
        (lambda: in_process(hidden=IT, visible=IT), "each node id once"),
        (lambda: in_process(hidden=IT, solution="test.py"), "a name other than those of test files"),
        (lambda: in_process(hidden=IT, solution="/etc/x.py"), "relative POSIX file name"),
        (lambda: in_process(hidden=IT, solution="test.py/x.py"), "a file or a folder"),
        (lambda: FunctionTest((object(),), 1), "FunctionTest.args: expected plain values"),
        (lambda: FunctionTest((1,), 1, {"key": {1: object()}}), "FunctionTest.kwargs: expected plain values"),
    ],
)
def test_a_suite_that_cannot_be_graded_is_refused_at_once(make, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make()
