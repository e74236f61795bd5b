"""A suite that cannot be graded is refused when it is made."""

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.grading import AssertSuite, FunctionSuite, FunctionTest, PytestSuite, StdioSuite


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FunctionSuite("f"), "expected at least one test"),
        (lambda: FunctionSuite("f", hidden=[FunctionTest((1,), 1)]), "expected a tuple of tests"),
        (lambda: FunctionSuite("f()", hidden=(FunctionTest((1,), 1),)), "expected the name of a function"),
        (lambda: FunctionSuite("f", hidden=(FunctionTest((1,), 1),), batch=0), "expected 1 or more"),
        (lambda: FunctionTest([1], 1), "expected a tuple"),
        (lambda: AssertSuite(("f",), hidden=("assert f(1)",)), "AssertSuite.hidden: expected items of type AssertTest"),
        (
            lambda: FunctionSuite("f", visible=(((1,), 1),)),
            "FunctionSuite.visible: expected items of type FunctionTest",
        ),
        (lambda: StdioSuite(hidden=({"stdin": ""},)), "StdioSuite.hidden: expected items of type StdioTest"),
        (
            lambda: PytestSuite({"t.py": b""}, (1,)),
            "PytestSuite.visible: expected items of type str, got 1. Use node ids.",
        ),
        (lambda: FunctionTest((object(),), 1), "FunctionTest.args: expected plain values"),
        (lambda: FunctionTest((1,), len), "FunctionTest.expected: expected plain values"),
        (lambda: FunctionTest((1,), 1, {"key": {1: object()}}), "FunctionTest.kwargs: expected plain values"),
    ],
)
def test_a_suite_that_cannot_be_graded_is_refused_at_once(make, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make()
