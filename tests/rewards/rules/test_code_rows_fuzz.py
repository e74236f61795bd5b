"""Damaged rows of programming problems: a suite with a test, or an error in the data that says what is wrong."""

import base64
import math
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv._util.syntax import parse_source
from agentenv.errors import DataError
from agentenv.rewards.rules.code.forms import FORMS, code_task, program_of
from agentenv.sandbox.grading import AssertSuite, FunctionSuite, PytestSuite
from tests.damage import check_message, damaged
from tests.envs.test_code_sandbox import ADD, MBPP_CLASS, ROWS
from tests.rewards.rules.test_code import ASSERTS, CHECK, PYTEST, SUM, TEXT, roll

CALLS = roll("input", {"stdin": "[1, 2]\n3", "expected_stdout": "[1, 2, 3]"}, function="push")
METHODS = roll("pytest", {"assert_code": "class TestIt:\n    def test_it(self):\n        assert add(1, 1) == 2"})
RIGHT = [
    *(row for row, *_ in ROWS.values()), ADD, MBPP_CLASS, SUM, ASSERTS, PYTEST, CHECK, TEXT, CALLS, METHODS,
    {**ADD, "comparison": {"rel_tol": 0.1}, "prelude": "import math", "mode": "function"},
]  # fmt: skip
COLUMNS = sorted({column for form in FORMS.values() for column in form.columns})
rows = st.sampled_from(RIGHT).flatmap(lambda row: damaged(row, others=RIGHT))


def sources_of(suite):
    """The Python sources of a suite: without them no program could pass."""
    match suite:
        case AssertSuite():
            return [suite.prelude, suite.solution_prelude, *(test.source for test in (*suite.visible, *suite.hidden))]
        case PytestSuite():
            return list(suite.files.values())
        case FunctionSuite():
            return [suite.prelude]
    return []


def is_read_or_refused(label, row=None):
    for strict in (False, True):
        try:
            task = code_task(label, row, strict=strict)
        except DataError as error:
            assert any(column in str(error) for column in (*COLUMNS, "label"))  # noqa: PT017 - a suite is right, too
            check_message(str(error))
            continue
        tests = (*task.suite.visible, *task.suite.hidden)
        assert tests
        for source in sources_of(task.suite):
            parse_source(source)
        program_of(task, "```python\nx = 1\n```", "")


def test_right_rows_are_read():
    for row in RIGHT:
        assert code_task(None, row).form in FORMS
        is_read_or_refused(None, row)


def packed(content):
    return base64.b64encode(zlib.compress(content)).decode()


CALL = {"args": [1], "expected": 2}
REFUSED = {
    "a test that is nested too deep to parse": ({"test_list": ["assert f(1) == " + "-" * 20_000 + "1"]}, "too deep"),
    "setup that is not Python": ({"test_list": ["assert f(1)"], "test_setup_code": "import ("}, "import \\("),
    "a prelude that is not Python": ({**ADD, "prelude": "import ("}, "import \\("),
    "an import prefix that is not Python": (roll("check_based", {
        "entry_point": "f", "import_prefix": "import (", "assert_code": "def check(g):\n    assert g(1)",
    }), "import \\("),
    "an input that cannot be encoded": ({"tests": [{"stdin": "\ud800", "stdout": ""}]}, "StdioTest.stdin"),
    "a keyword as the function": ({"entry_point": "class", "tests": [CALL]}, "entry_point"),
    "arguments in a text": ({"entry_point": "f", "tests": [{**CALL, "args": "ab"}]}, "where a list is needed"),
    "a tolerance that no float holds": ({**ADD, "comparison": {"rel_tol": 10**400}}, "rel_tol"),
    "an option that is a text": ({**ADD, "comparison": {"int_as_float": "no"}}, "int_as_float"),
    "inputs in a text": ({"input_output": {"inputs": "12", "outputs": "24"}}, "where a list is needed"),
    "a pickle of 2**63 bytes": ({"private_test_cases": packed(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.")}, "test_cases"),
    "a pickle that fills the memory": ({"private_test_cases": packed(b"\x80\x04]r\xff\xff\xff\x7f.")}, "EMPTY_LIST"),
    "a mode that is a list": ({**ADD, "mode": ["function"]}, "mode: list"),
}  # fmt: skip
"""Rows that the fuzzer found, each with what its error says."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_without_tests_that_a_program_can_pass_is_the_datas_error(name):
    row, reason = REFUSED[name]
    with pytest.raises(DataError, match=reason):
        code_task(None, row)
    is_read_or_refused(None, row)


def test_keys_that_are_no_text_are_not_made_integers():
    row = {"input_output": {"inputs": [[{math.inf: 1}]], "outputs": [{1.5: 1}], "fn_name": "f"}}
    (test,) = code_task(None, row).suite.hidden
    assert (test.args, test.expected) == (({math.inf: 1},), {1.5: 1})


@given(rows)
@settings(max_examples=60)
def test_a_damaged_row_is_read_or_is_the_datas_error(row):
    is_read_or_refused(None, row if isinstance(row, dict) else {"label": row})


@pytest.mark.long
@given(rows, st.sampled_from([None, *RIGHT]))
@settings(max_examples=600)
def test_a_damaged_label_is_read_or_is_the_datas_error(label, row):
    is_read_or_refused(label, row)
