"""Read the plain form of a row, and build suites for the other forms.

`visible` and `hidden`, lists of `{"args": [...], "expected": ...}` with an `entry_point`, of
`{"stdin": ..., "stdout": ...}` (or `input` and `output`), or of Python source with asserts and an `entry_point`. Of
`tests` alone the first is visible. Besides: `mode` (function, stdio or assert), `comparison` (fields of `Comparison`),
`text_mode` (of `StdioSuite`), `prelude` and `starter_code`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentenv.rewards.rules.code.assert_rows import with_asserts
from agentenv.rewards.rules.code.task import CodeTask, as_items, as_text, first_visible
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
"""Expected values that were stored as JSON have no tuples."""
MAX_EXAMPLE_CHARS = 600


def plain_task(row: Mapping[str, Any]) -> CodeTask:
    """Return the tests of a row of this form."""
    if "tests" in row:
        visible, hidden = first_visible(as_items(row["tests"]))
    else:
        visible, hidden = as_items(row.get("visible") or []), as_items(row.get("hidden") or [])
    first = (visible + hidden)[0] if visible or hidden else None
    mode = row.get("mode") or (
        "assert" if isinstance(first, str) else "function" if "args" in (first or {}) else "stdio"
    )
    suite = _SUITES[mode](row, visible, hidden)
    examples: tuple[str, ...] = ()
    if isinstance(suite, FunctionSuite):
        examples = tuple(example_text(suite.entry_point, test) for test in suite.visible)
    elif isinstance(suite, StdioSuite):
        examples = tuple(example_text("", test) for test in suite.visible)
    elif isinstance(suite, AssertSuite):
        examples = tuple(test.source for test in suite.visible)
    return CodeTask("plain", suite, examples, str(row.get("starter_code") or ""))


def function_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    """Return tests that are calls of `entry_point`, with their values."""

    def tests(rows: Sequence[Any]) -> tuple[FunctionTest, ...]:
        return tuple(
            FunctionTest(tuple(as_items(one["args"])), one["expected"], dict(one.get("kwargs") or {})) for one in rows
        )

    how = Comparison(**{**JSON_VALUES, **(row.get("comparison") or {})})
    prelude = as_text(row.get("prelude") or "")
    return FunctionSuite(row["entry_point"], tests(visible), tests(hidden), comparison=how, prelude=prelude)


def stdio_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> StdioSuite:
    """Return tests that are inputs and outputs of a program."""

    def tests(rows: Sequence[Any]) -> tuple[StdioTest, ...]:
        return tuple(
            StdioTest(as_text(_either(one, "stdin", "input")), as_text(_either(one, "stdout", "output")))
            for one in rows
        )

    how = Comparison(**(row.get("comparison") or {}))
    return StdioSuite(tests(visible), tests(hidden), mode=row.get("text_mode") or "lines", comparison=how)


def _either(test: Mapping[str, Any], name: str, alias: str) -> Any:
    return test[alias] if alias in test and name not in test else test[name]


def _assert_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    names, prelude = tuple(as_items(row.get("names") or [row["entry_point"]])), as_text(row.get("prelude") or "")

    def tests(rows: Sequence[Any]) -> tuple[AssertTest, ...]:
        return tuple(map(AssertTest, with_asserts(map(as_text, rows), names, prelude)))

    return AssertSuite(names, tests(visible), tests(hidden), prelude=prelude)


_SUITES: dict[str, Callable[[Mapping[str, Any], Sequence[Any], Sequence[Any]], TestSuite]] = {
    "function": function_suite,
    "stdio": stdio_suite,
    "assert": _assert_suite,
}


def example_text(entry_point: str, test: FunctionTest | StdioTest) -> str:
    """Return a visible test as text: a call and its value, or an input and its output."""
    if isinstance(test, FunctionTest):
        arguments = [*map(repr, test.args), *(f"{name}={value!r}" for name, value in test.kwargs.items())]
        return _shorten(f"{entry_point}({', '.join(arguments)}) == {test.expected!r}")
    return f"Input:\n{_block(test.stdin)}\nOutput:\n{_block(test.expected)}"


def _block(text: str) -> str:
    return f"```\n{_shorten(text.rstrip(chr(10)))}\n```"


def _shorten(text: str) -> str:
    if len(text) <= MAX_EXAMPLE_CHARS:
        return text
    half = MAX_EXAMPLE_CHARS // 2
    return f"{text[:half]} … {text[-half:]}"
