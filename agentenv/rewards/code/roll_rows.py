"""Rows of ROLL's code sandbox: `case_type`, `test_cases` and `test_case_function`.

`test_cases` is a list, or its JSON, of which `case_type` says what is in it:

| case_type | a case | the tests |
|---|---|---|
| input | `stdin`, `expected_stdout` | inputs and outputs; calls and values in JSON with a `test_case_function` |
| assert, pytest | `assert_code` | each `test_…` function; without one, each statement that asserts |
| check_based | `assert_code` with a `check`, `entry_point`, `import_prefix` | each statement of `check` that asserts |
| text | `assert_code` with `{response}` | as assert, of what the response says; it needs no program |

Source: github.com/alibaba/ROLL, roll/pipeline/rlvr/rewards/code_sandbox_reward_worker.py. There an empty list of cases,
an exit before the asserts, and a text with quotation marks in it pass; here nothing passes that was not seen to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.rewards.code.assert_rows import human_eval_suite, split_tests, strongest_suite
from agentenv.rewards.code.benchmark_rows import as_calls
from agentenv.rewards.code.plain import function_suite, stdio_suite
from agentenv.rewards.code.task import TEST_PRELUDE, CodeTask, as_text, parsed, prelude_for
from agentenv.sandbox.grading import AssertSuite, AssertTest, TestSuite

ROLL_COLUMNS = ("case_type", "test_cases", "test_case_function")
CASE_TYPES = ("input", "assert", "pytest", "check_based", "text")
RESPONSE = "given_response"
"""The function that tests of a text call for it."""
_NO_FUNCTION = (None, "", "None")


def roll_task(row: Mapping[str, Any]) -> CodeTask:
    """The tests of a row of this form, all of them hidden."""
    cases = parsed("test_cases", row["test_cases"])
    kind = row.get("case_type") or "input"
    if kind not in CASE_TYPES:
        raise ValueError(f"the case_type {kind!r:.80} where one of {', '.join(CASE_TYPES)} is needed")
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"test_cases {cases!r:.80} where a list with at least one is needed")
    if kind == "input":
        return CodeTask("roll", _of_inputs(cases, row.get("test_case_function")))
    if kind == "check_based":
        return CodeTask("roll", _of_checks(cases))
    sources = [as_text(case["assert_code"] if isinstance(case, Mapping) else case) for case in cases]
    if kind == "text":
        return CodeTask("roll", _of_text(sources), of_text=True)
    return CodeTask("roll", strongest_suite(sources))


def program_of_text(text: str) -> str:
    """A program that says a text and does nothing else, for the tests of `text` cases."""
    return f"def {RESPONSE}():\n    return {text!r}\n"


def _of_inputs(cases: Sequence[Mapping[str, Any]], function: Any) -> TestSuite:
    if function in _NO_FUNCTION:
        return stdio_suite({}, [], [{"stdin": case["stdin"], "stdout": case["expected_stdout"]} for case in cases])
    row = {"entry_point": as_text(function), "prelude": prelude_for(function)}
    return function_suite(row, [], as_calls(cases, "stdin", "expected_stdout"))


def _of_checks(cases: Sequence[Mapping[str, Any]]) -> TestSuite:
    names = {str(case["entry_point"]) for case in cases}
    befores = {str(case.get("import_prefix") or "") for case in cases}
    if len(names) > 1 or len(befores) > 1:
        raise ValueError(f"cases of several functions, {sorted(names)!r:.80}, or import prefixes")
    entry = names.pop()
    suites = [
        human_eval_suite({"entry_point": case["entry_point"], "prompt": "", "test": case["assert_code"]})
        for case in cases
    ]
    hidden = tuple(test for suite in suites for test in suite.hidden)
    before = f"{prelude_for(entry)}{befores.pop()}"
    return AssertSuite((entry,), hidden=hidden, prelude=TEST_PRELUDE, solution_prelude=before)


def _of_text(sources: Sequence[str]) -> TestSuite:
    """The text crosses as a value: it never becomes part of a source."""
    without = [source for source in sources if "{response}" not in source]
    if without:
        raise ValueError(f"assert_code without {{response}}, {without[0]!r:.80}")
    tests = [test for source in sources for test in split_tests(source.replace("{response}", f"{RESPONSE}()"))]
    return AssertSuite((RESPONSE,), hidden=tuple(map(AssertTest, tests)), prelude=TEST_PRELUDE)
