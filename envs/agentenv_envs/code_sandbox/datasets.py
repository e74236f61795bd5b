"""Rows of datasets to suites of tests: our own plain form, HumanEval, MBPP, APPS and LiveCodeBench.

    python -m agentenv_envs.code_sandbox.datasets mbpp.jsonl OUT.jsonl --prompt_key text

The environment reads all of them itself; the command is for where only a prompt and a label get through, as in
OpenRLHF. What it writes under `label` is what the form needs of the row.

The plain form: `visible` and `hidden`, lists of `{"args": [...], "expected": ...}` with an `entry_point`, of
`{"stdin": ..., "stdout": ...}` (or `input` and `output`), or of Python source with asserts and an `entry_point`. Of
`tests` alone the first is visible. Besides: `mode` (function, stdio or assert), `comparison` (fields of `Comparison`),
`text_mode` (of `StdioSuite`), `prelude` and `starter_code`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.dataset import read_tasks
from agentenv.errors import DataError
from agentenv.sandbox.grading import (
    AssertSuite,
    AssertTest,
    Comparison,
    FunctionSuite,
    FunctionTest,
    StdioSuite,
    StdioTest,
    TestSuite,
    same_value,
)
from agentenv_envs.code_sandbox.assert_rows import human_eval_suite, mbpp_suite
from agentenv_envs.code_sandbox.texts import example_text

MAX_TESTS_BYTES = 256 << 20
"""Of a row's packed tests, once unpacked."""
APPS_COLUMNS = ("inputs", "outputs", "fn_name", "starter_code")
_EXAMPLES = (
    'as {"entry_point": "add", "visible": [{"args": [1, 2], "expected": 3}], "hidden": [...]}, '
    'or with tests {"stdin": "1 2", "stdout": "3"}'
)
_JSON_VALUES = {"tuple_as_list": True}
"""Expectations that were stored as JSON have no tuples."""


@dataclass(frozen=True, slots=True)
class CodeTask:
    """What a row asks for."""

    form: str
    """plain, humaneval, mbpp, apps or livecodebench."""
    suite: TestSuite
    examples: tuple[str, ...] = ()
    """To be shown under the prompt: of visible tests, where the prompt has none."""
    starter_code: str = ""
    """To be shown there, too."""


@dataclass(frozen=True, slots=True)
class _Form:
    marks: tuple[set[str], ...]
    """Columns of which a row of this form has one set."""
    columns: tuple[str, ...]
    """All that it needs of a row."""
    read: Callable[[Mapping[str, Any]], CodeTask]


def code_task(label: Any, row: Mapping[str, Any] | None = None) -> CodeTask:
    """The tests of a task: of its label, and of the other columns of its row.

    Raises:
        DataError: they have no known form, or not what it needs.
    """
    columns = {**(row or {}), **_label_columns(label)}
    name = form_of(columns)
    try:
        return _FORMS[name].read(columns)
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"code_sandbox: expected a row of the form {name} ({', '.join(_FORMS[name].columns)}), got {told:.400}. "
            f"Mend or remove the row{f'; a label is {_EXAMPLES}' * (name == 'plain')}."
        ) from error


def form_of(columns: Mapping[str, Any]) -> str:
    """The form of a row, by the columns that it has.

    Raises:
        DataError: it has those of none.
    """
    for name, form in _FORMS.items():
        if any(marks <= columns.keys() for marks in form.marks):
            return name
    known = "; ".join(f"{name}: {', '.join(form.columns)}" for name, form in _FORMS.items())
    raise DataError(
        f"code_sandbox: expected the tests of a task, by the columns of a known form ({known}), got the columns "
        f"{sorted(columns)!r:.200}. Put the tests into the label, {_EXAMPLES}; "
        "or leave the label out with --label_key ''."
    )


def _label_columns(label: Any) -> Mapping[str, Any]:
    """A label as columns: an object, a list of tests or asserts, JSON of these, or the source of a `check`."""
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        label = _parsed("label", label)
    if isinstance(label, Mapping):
        return label
    if isinstance(label, list):
        return {"tests": label} if all(isinstance(one, Mapping) for one in label) else {"test_list": label}
    if isinstance(label, str) and "def check(" in label:
        return {"test": label}
    return {}


# --- plain ---------------------------------------------------------------------------------------------------------


def _plain(row: Mapping[str, Any]) -> CodeTask:
    if "tests" in row:
        visible, hidden = _first_visible(list(row["tests"]))
    else:
        visible, hidden = list(row.get("visible") or []), list(row.get("hidden") or [])
    first = (visible + hidden)[0] if visible or hidden else None
    mode = row.get("mode") or (
        "assert" if isinstance(first, str) else "function" if "args" in (first or {}) else "stdio"
    )
    suite = _PLAIN_SUITES[mode](row, visible, hidden)
    return CodeTask("plain", suite, _examples(suite), str(row.get("starter_code") or ""))


def _first_visible(tests: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The first test to be shown, the others to be kept; a lone one is kept."""
    cut = 1 if len(tests) > 1 else 0
    return list(tests[:cut]), list(tests[cut:])


def _function_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    def tests(rows: Sequence[Any]) -> tuple[FunctionTest, ...]:
        """Calls and their values."""
        return tuple(FunctionTest(tuple(one["args"]), one["expected"], dict(one.get("kwargs") or {})) for one in rows)

    how = Comparison(**{**_JSON_VALUES, **(row.get("comparison") or {})})
    prelude = str(row.get("prelude") or "")
    return FunctionSuite(row["entry_point"], tests(visible), tests(hidden), comparison=how, prelude=prelude)


def _stdio_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    def tests(rows: Sequence[Any]) -> tuple[StdioTest, ...]:
        """Inputs and their outputs."""
        return tuple(
            StdioTest(_text(_either(one, "stdin", "input")), _text(_either(one, "stdout", "output"))) for one in rows
        )

    how = Comparison(**(row.get("comparison") or {}))
    return StdioSuite(tests(visible), tests(hidden), mode=row.get("text_mode") or "lines", comparison=how)


def _either(test: Mapping[str, Any], name: str, alias: str) -> Any:
    return test[alias] if alias in test and name not in test else test[name]


def _assert_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    def tests(rows: Sequence[Any]) -> tuple[AssertTest, ...]:
        """Source, as it is."""
        return tuple(AssertTest(_text(one)) for one in rows)

    names = tuple(row.get("names") or [row["entry_point"]])
    return AssertSuite(names, tests(visible), tests(hidden), prelude=str(row.get("prelude") or ""))


_PLAIN_SUITES: dict[str, Callable[[Mapping[str, Any], Sequence[Any], Sequence[Any]], TestSuite]] = {
    "function": _function_suite,
    "stdio": _stdio_suite,
    "assert": _assert_suite,
}


# --- others' forms --------------------------------------------------------------------------------------------------


def _human_eval(row: Mapping[str, Any]) -> CodeTask:
    return CodeTask("humaneval", human_eval_suite(row))


def _mbpp(row: Mapping[str, Any]) -> CodeTask:
    visible, hidden = _first_visible([str(test) for test in _parsed("test_list", row["test_list"])])
    hidden += [str(test) for test in _parsed("challenge_test_list", row.get("challenge_test_list") or [])]
    return CodeTask("mbpp", mbpp_suite(row, visible, hidden), tuple(visible))


def _apps(row: Mapping[str, Any]) -> CodeTask:
    """Source: hendrycks/apps, eval/testing_util.py: a value may be stored in a list of its own."""
    pairs = _parsed("input_output", row.get("input_output") or {key: row.get(key) for key in APPS_COLUMNS})
    inputs, outputs, name = pairs["inputs"], pairs["outputs"], pairs.get("fn_name") or row.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    starter = str(row.get("starter_code") or "")
    if not name:
        rows = [{"stdin": _lines(given), "stdout": _lines(out)} for given, out in zip(inputs, outputs, strict=True)]
        return CodeTask("apps", _stdio_suite({"text_mode": "tokens"}, *_first_visible(rows)), starter_code=starter)
    rows = [{"args": given, "expected": out} for given, out in zip(inputs, outputs, strict=True)]
    visible, hidden = (
        tuple(FunctionTest(tuple(one["args"]), one["expected"]) for one in part) for part in _first_visible(rows)
    )
    suite = FunctionSuite(_in_class(name, starter), visible, hidden, checker=same_or_boxed, prelude=PRELUDE)
    return CodeTask("apps", suite, starter_code=starter)


def _live_code_bench(row: Mapping[str, Any]) -> CodeTask:
    visible, hidden = _tests("public_test_cases", row), _tests("private_test_cases", row)
    starter = str(row.get("starter_code") or "")
    metadata = _parsed("metadata", row.get("metadata") or {})
    name = metadata.get("func_name") or row.get("func_name")
    if any(test.get("testtype") == "functional" for test in visible + hidden):
        if not name:
            raise KeyError("func_name")
        row = {"entry_point": _in_class(name, starter), "prelude": PRELUDE}
        return CodeTask("livecodebench", _function_suite(row, _calls(visible), _calls(hidden)), starter_code=starter)
    shown, kept = ([{"stdin": t["input"], "stdout": t["output"]} for t in tests] for tests in (visible, hidden))
    return CodeTask("livecodebench", _stdio_suite({}, shown, kept), starter_code=starter)


def _calls(tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An argument in JSON on each line of an input."""
    return [
        {
            "args": [json.loads(line) for line in str(test["input"]).splitlines() if line.strip()],
            "expected": json.loads(test["output"]),
        }
        for test in tests
    ]


def _tests(name: str, row: Mapping[str, Any]) -> list[Any]:
    """Test cases as a list, JSON, or JSON that is pickled, deflated and in base 64, as the private ones are."""
    value = row.get(name) or []
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        value = _unpacked(value)
    return list(_parsed(name, value))


def _unpacked(text: str) -> Any:
    unzip = zlib.decompressobj()
    try:
        content = unzip.decompress(base64.b64decode(text), MAX_TESTS_BYTES)
        if unzip.unconsumed_tail:
            raise ValueError(f"tests of more than {MAX_TESTS_BYTES} bytes")
        return content.decode() if content[:1] in b"[{" else _PlainUnpickler(io.BytesIO(content)).load()
    except (zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"tests that cannot be unpacked ({error})") from error


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain values only: a pickle that names anything to import is refused."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse it."""
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


PRELUDE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""What solutions in these sets take for granted."""


def same_or_boxed(given: Any, expected: Any, got: Any) -> bool:
    """Whether a value is the expected one, or the only one of a list of expected ones."""
    how = Comparison(**_JSON_VALUES)
    boxed = isinstance(expected, list) and len(expected) == 1 and same_value(expected[0], got, how)
    return boxed or same_value(expected, got, how)


def _in_class(name: str, starter: str) -> str:
    return f"Solution.{name}" if "class Solution" in starter else str(name)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) + "\n" if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} where text is needed")
    return value


def _parsed(name: str, value: Any) -> Any:
    """The value of a column that may hold JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"code_sandbox: {name}: expected JSON, got {value!r:.60} ({error}). Mend the row.") from error


def _examples(suite: TestSuite) -> tuple[str, ...]:
    """Visible tests, to be read."""
    if isinstance(suite, FunctionSuite):
        return tuple(example_text(suite.entry_point, test) for test in suite.visible)
    if isinstance(suite, StdioSuite):
        return tuple(example_text("", test) for test in suite.visible)
    return tuple(test.source for test in suite.visible) if isinstance(suite, AssertSuite) else ()


_SHARED = ("entry_point", "prelude", "starter_code")
_FORMS = {
    "plain": _Form(
        ({"visible"}, {"hidden"}, {"tests"}),
        ("mode", "visible", "hidden", "tests", "names", "comparison", "text_mode", *_SHARED),
        _plain,
    ),
    "livecodebench": _Form(
        ({"public_test_cases"}, {"private_test_cases"}),
        ("public_test_cases", "private_test_cases", "metadata", "func_name", "starter_code"),
        _live_code_bench,
    ),
    "apps": _Form(({"input_output"}, {"inputs", "outputs"}), ("input_output", *APPS_COLUMNS), _apps),
    "humaneval": _Form(({"test", "entry_point"},), ("test", "entry_point", "prompt"), _human_eval),
    "mbpp": _Form(
        ({"test_list"},), ("test_list", "challenge_test_list", "test_setup_code", "test_imports", "code"), _mbpp
    ),
}


def main() -> None:
    """Writes the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", help="a file or Hugging Face dataset, as --data")
    parser.add_argument("out", type=Path, help="JSONL to write")
    parser.add_argument("--prompt_key", default="prompt", help="column with the question")
    parser.add_argument("--split", default=None, help="of a Hugging Face dataset")
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for task in read_tasks(args.data, prompt_key=args.prompt_key, label_key=None, split=args.split):
            columns = {**task.metadata, "prompt": task.prompt}
            _ = code_task(None, columns)
            label = {key: columns[key] for key in _FORMS[form_of(columns)].columns if columns.get(key) is not None}
            file.write(json.dumps({"id": task.task_id, "prompt": task.prompt, "label": label}) + "\n")


if __name__ == "__main__":
    main()
