"""The plain form of a row, and the suites that others are made of, too.

`visible` and `hidden`, lists of `{"args": [...], "expected": ...}` with an `entry_point`, of
`{"stdin": ..., "stdout": ...}` (or `input` and `output`), or of Python source with asserts and an `entry_point`. Of
`tests` alone the first is visible. Besides: `mode` (function, stdio or assert), `comparison` (fields of `Comparison`),
`text_mode` (of `StdioSuite`), `prelude` and `starter_code`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentenv.rewards.code.task import CodeTask, as_text, first_visible
from agentenv.rewards.code.texts import example_text
from agentenv.sandbox.grading import (
    AssertSuite,
    AssertTest,
    Comparison,
    FunctionSuite,
    FunctionTest,
    StdioSuite,
    StdioTest,
    TestSuite,
)

JSON_VALUES = {"tuple_as_list": True}
"""Expectations that were stored as JSON have no tuples."""


def plain_task(row: Mapping[str, Any]) -> CodeTask:
    """The tests of a row of this form."""
    if "tests" in row:
        visible, hidden = first_visible(list(row["tests"]))
    else:
        visible, hidden = list(row.get("visible") or []), list(row.get("hidden") or [])
    first = (visible + hidden)[0] if visible or hidden else None
    mode = row.get("mode") or (
        "assert" if isinstance(first, str) else "function" if "args" in (first or {}) else "stdio"
    )
    suite = _SUITES[mode](row, visible, hidden)
    return CodeTask("plain", suite, _examples(suite), str(row.get("starter_code") or ""))


def function_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    """Tests as calls of `entry_point`, and their values."""

    def tests(rows: Sequence[Any]) -> tuple[FunctionTest, ...]:
        """Calls and their values."""
        return tuple(FunctionTest(tuple(one["args"]), one["expected"], dict(one.get("kwargs") or {})) for one in rows)

    how = Comparison(**{**JSON_VALUES, **(row.get("comparison") or {})})
    prelude = str(row.get("prelude") or "")
    return FunctionSuite(row["entry_point"], tests(visible), tests(hidden), comparison=how, prelude=prelude)


def stdio_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    """Tests as inputs and outputs of a program."""

    def tests(rows: Sequence[Any]) -> tuple[StdioTest, ...]:
        """Inputs and their outputs."""
        return tuple(
            StdioTest(as_text(_either(one, "stdin", "input")), as_text(_either(one, "stdout", "output")))
            for one in rows
        )

    how = Comparison(**(row.get("comparison") or {}))
    return StdioSuite(tests(visible), tests(hidden), mode=row.get("text_mode") or "lines", comparison=how)


def _either(test: Mapping[str, Any], name: str, alias: str) -> Any:
    return test[alias] if alias in test and name not in test else test[name]


def _assert_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    def tests(rows: Sequence[Any]) -> tuple[AssertTest, ...]:
        """Source, as it is."""
        return tuple(AssertTest(as_text(one)) for one in rows)

    names = tuple(row.get("names") or [row["entry_point"]])
    return AssertSuite(names, tests(visible), tests(hidden), prelude=str(row.get("prelude") or ""))


def _examples(suite: TestSuite) -> tuple[str, ...]:
    """Visible tests, to be read."""
    if isinstance(suite, FunctionSuite):
        return tuple(example_text(suite.entry_point, test) for test in suite.visible)
    if isinstance(suite, StdioSuite):
        return tuple(example_text("", test) for test in suite.visible)
    return tuple(test.source for test in suite.visible) if isinstance(suite, AssertSuite) else ()


_SUITES: dict[str, Callable[[Mapping[str, Any], Sequence[Any], Sequence[Any]], TestSuite]] = {
    "function": function_suite,
    "stdio": stdio_suite,
    "assert": _assert_suite,
}
