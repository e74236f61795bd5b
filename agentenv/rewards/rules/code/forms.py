"""Convert rows of datasets to test suites: our own plain form, LiveCodeBench, APPS, HumanEval, MBPP and ROLL's.

The plain form is the library's. It has `visible` and `hidden`, lists of `{"args": [...], "expected": ...}` with an
`entry_point`, of `{"stdin": ..., "stdout": ...}` (or `input` and `output`), or of Python source with asserts and an
`entry_point`. Of `tests` alone the first is visible. Besides: `mode` (function, stdio or assert), `comparison` (fields
of `Comparison`), `text_mode` (of `StdioSuite`), `prelude` and `starter_code`.

ROLL's rows have `case_type`, `test_cases` and `test_case_function`. `test_cases` is a list, or its JSON, whose members
depend on `case_type`:

| case_type | a case | the tests |
|---|---|---|
| input | `stdin`, `expected_stdout` | inputs and outputs; calls and values in JSON with a `test_case_function` |
| assert, pytest | `assert_code` | each `test_…` function; without one, each asserting statement |
| check_based | `assert_code` with a `check`, `entry_point`, `import_prefix` | each asserting statement of `check` |
| text | `assert_code` with `{response}` | as assert, for the text of the response, which needs no program |

Source: github.com/alibaba/ROLL, roll/pipeline/rlvr/rewards/code_sandbox_reward_worker.py. There an empty list of cases,
an exit before the asserts, and a text with quotation marks pass; here every pass is verified.
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentenv._util.jsonable import arrays_as_lists
from agentenv._util.syntax import parse_source
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.rules.code.assert_rows import (
    human_eval_suite,
    mbpp_suite,
    split_tests,
    strongest_suite,
    with_asserts,
)
from agentenv.rewards.rules.code.extract import MAX_CODE_CHARS, extract_code
from agentenv.rewards.rules.code.task import (
    SOLUTION_PRELUDE,
    TEST_PRELUDE,
    CodeTask,
    as_items,
    as_text,
    first_visible,
    parse_column,
)
from agentenv.rewards.rules.text import final_text
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

JSON_VALUES = {"tuple_as_list": True}
"""Expected values that were stored as JSON have no tuples."""
MAX_EXAMPLE_CHARS = 600
MAX_TESTS_BYTES = 256 << 20
"""Maximum size of a row's tests after decompression."""
PYTHON_NUMBERS = {"int_as_float": True, "bool_as_int": True}
"""Options of `Comparison` by which numbers are equal as in Python, where 1, 1.0 and True are."""
APPS_COLUMNS = ("inputs", "outputs", "fn_name", "starter_code")


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
    suite: Any = _SUITES[mode](row, visible, hidden)
    examples = tuple(example_text(getattr(suite, "entry_point", ""), test) for test in suite.visible)
    return CodeTask("plain", suite, examples, str(row.get("starter_code") or ""))


def function_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    """Return tests that are calls of `entry_point`, with their values."""
    shown, kept = (
        tuple(FunctionTest(tuple(as_items(t["args"])), t["expected"], dict(t.get("kwargs") or {})) for t in tests)
        for tests in (visible, hidden)
    )
    how = Comparison(**{**JSON_VALUES, **(row.get("comparison") or {})})
    return FunctionSuite(row["entry_point"], shown, kept, comparison=how, prelude=as_text(row.get("prelude") or ""))


def stdio_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> StdioSuite:
    """Return tests that are inputs and outputs of a program."""
    shown, kept = (
        tuple(StdioTest(_text_of(t, "stdin", "input"), _text_of(t, "stdout", "output")) for t in tests)
        for tests in (visible, hidden)
    )
    how = Comparison(**(row.get("comparison") or {}))
    return StdioSuite(shown, kept, mode=row.get("text_mode") or "lines", comparison=how)


def _text_of(test: Mapping[str, Any], name: str, alias: str) -> str:
    return as_text(test[alias] if alias in test and name not in test else test[name])


def assert_suite(row: Mapping[str, Any], visible: Sequence[Any], hidden: Sequence[Any]) -> TestSuite:
    """Return tests that are Python source with asserts."""
    names, prelude = tuple(as_items(row.get("names") or [row["entry_point"]])), as_text(row.get("prelude") or "")
    shown, kept = (
        tuple(map(AssertTest, with_asserts(map(as_text, tests), names, prelude))) for tests in (visible, hidden)
    )
    return AssertSuite(names, shown, kept, prelude=prelude)


_SUITES: dict[str, Callable[[Mapping[str, Any], Sequence[Any], Sequence[Any]], TestSuite]] = {
    "function": function_suite,
    "stdio": stdio_suite,
    "assert": assert_suite,
}


def example_text(entry_point: str, test: FunctionTest | StdioTest | AssertTest) -> str:
    """Return a visible test as text: a call and its value, an input and its output, or its source."""
    if isinstance(test, AssertTest):
        return test.source
    if isinstance(test, FunctionTest):
        arguments = [*map(repr, test.args), *(f"{name}={value!r}" for name, value in test.kwargs.items())]
        return _shorten(f"{entry_point}({', '.join(arguments)}) == {test.expected!r}")
    given, out = (_shorten(text.rstrip("\n")) for text in (test.stdin, test.expected))
    return f"Input:\n```\n{given}\n```\nOutput:\n```\n{out}\n```"


def _shorten(text: str) -> str:
    if len(text) <= MAX_EXAMPLE_CHARS:
        return text
    half = MAX_EXAMPLE_CHARS // 2
    return f"{text[:half]} … {text[-half:]}"


def human_eval(row: Mapping[str, Any]) -> CodeTask:
    """Return the asserts in the `check` of a row of HumanEval."""
    return CodeTask("humaneval", human_eval_suite(row))


def mbpp(row: Mapping[str, Any]) -> CodeTask:
    """Return the asserts of a row of MBPP."""
    visible, hidden = first_visible(list(map(str, as_items(parse_column("test_list", row["test_list"])))))
    challenges = parse_column("challenge_test_list", row.get("challenge_test_list") or [])
    hidden += map(str, as_items(challenges))
    return CodeTask("mbpp", mbpp_suite(row, visible, hidden), tuple(visible))


def apps(row: Mapping[str, Any], *, strict: bool = False, official: bool = False) -> CodeTask:
    """Return the tests of a row of APPS, with outputs compared as by a contest's checker.

    With `official`, they are compared as by its own evaluator, in any order, and so are the values of calls unless
    `strict`. A value may be stored in a list. Keys of objects are integers where all can be. Source: hendrycks/apps,
    eval/testing_util.py, but integers have no tolerance, repetitions count, and the first of several values is not
    accepted for all.
    """
    pairs = parse_column("input_output", row.get("input_output") or {key: row.get(key) for key in APPS_COLUMNS})
    inputs, outputs = as_items(pairs["inputs"]), as_items(pairs["outputs"])
    name = pairs.get("fn_name") or row.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    starter = str(row.get("starter_code") or "")
    if not name:
        rows = [{"stdin": _lines(value), "stdout": _lines(out)} for value, out in zip(inputs, outputs, strict=True)]
        how = {"text_mode": "tokens" if strict else "apps" if official else "contest"}
        stdio = stdio_suite(how, *first_visible(rows))
        return CodeTask("apps", replace(stdio, any_exit_code=not strict), starter_code=starter)
    if not strict:
        inputs, outputs = list(map(_with_int_keys, inputs)), list(map(_with_int_keys, outputs))
    tests = [FunctionTest(tuple(arguments), out) for arguments, out in zip(inputs, outputs, strict=True)]
    visible, hidden = map(tuple, first_visible(tests))
    checker = _STRICT if strict else _AS_IN_PYTHON
    suite = FunctionSuite(_in_class(name, starter), visible, hidden, checker=checker, prelude=SOLUTION_PRELUDE)
    return CodeTask("apps", suite, starter_code=starter)


def live_code_bench(row: Mapping[str, Any], *, strict: bool = False) -> CodeTask:
    """Return the tests of a row of LiveCodeBench, compared as its evaluator does unless `strict`.

    They are inputs and outputs, or calls and values. Source: LiveCodeBench/LiveCodeBench,
    lcb_runner/evaluation/testing_util.py, except that a tuple equals a list inside of another value, too.
    """
    visible, hidden = _tests("public_test_cases", row), _tests("private_test_cases", row)
    starter = str(row.get("starter_code") or "")
    metadata = parse_column("metadata", row.get("metadata") or {})
    name = metadata.get("func_name") or row.get("func_name")
    if any(test.get("testtype") == "functional" for test in visible + hidden):
        if not name:
            raise KeyError("func_name")
        entry = _in_class(name, starter)
        row = {"entry_point": entry, "prelude": SOLUTION_PRELUDE, "comparison": {} if strict else PYTHON_NUMBERS}
        return CodeTask("livecodebench", function_suite(row, as_calls(visible), as_calls(hidden)), starter_code=starter)
    shown, kept = ([{"stdin": t["input"], "stdout": t["output"]} for t in tests] for tests in (visible, hidden))
    suite = stdio_suite({} if strict else {"text_mode": "livecodebench"}, shown, kept)
    return CodeTask("livecodebench", replace(suite, any_exit_code=not strict), starter_code=starter)


def as_calls(tests: Sequence[Mapping[str, Any]], given: str = "input", out: str = "output") -> list[dict[str, Any]]:
    """Return calls and values in the plain form, from tests with one JSON argument on each line of an input."""
    calls = []
    for test in tests:
        arguments = [json.loads(line) for line in str(test[given]).splitlines() if line.strip()]
        calls.append({"args": arguments, "expected": json.loads(test[out])})
    return calls


def _tests(name: str, row: Mapping[str, Any]) -> list[Any]:
    """Return test cases from a list, JSON, or pickled, deflated and base64-encoded JSON, as the private ones are."""
    value = row.get(name) or []
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        unzip = zlib.decompressobj()
        try:
            content = unzip.decompress(base64.b64decode(value), MAX_TESTS_BYTES)
            if unzip.unconsumed_tail:
                raise ValueError(f"tests of more than {MAX_TESTS_BYTES} bytes")
            if content[:1] in b"[{":
                value = content.decode()
            else:  # a pickle of a text: other pickles import, or allocate without bounds
                value = ""
                for code, argument, _ in pickletools.genops(content):
                    if "UNICODE" in code.name:
                        value = str(argument)
                    elif code.name not in ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"):
                        raise ValueError(f"a pickle with {code.name} where only a text is allowed")
        except (zlib.error, ValueError) as error:
            raise ValueError(f"tests that cannot be unpacked ({error})") from error
    return as_items(parse_column(name, value))


def _same_or_boxed(how: Comparison, given: Any, expected: Any, got: Any) -> bool:
    """Return True if a value equals the expected one, or the only one of a list of expected ones."""
    boxed = isinstance(expected, list) and len(expected) == 1 and same_value(expected[0], got, how)
    return boxed or same_value(expected, got, how)


_STRICT = partial(_same_or_boxed, Comparison(**JSON_VALUES))
_AS_IN_PYTHON = partial(_same_or_boxed, Comparison(**JSON_VALUES, **PYTHON_NUMBERS))


def _with_int_keys(value: Any) -> Any:
    """Return a value in which an object, also the only one of a list, has the integer keys that JSON made text."""
    if isinstance(value, list) and len(value) == 1:
        return [_with_int_keys(each) if isinstance(each, dict) else each for each in value]
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return value
    try:
        return {int(key): each for key, each in value.items()}
    except ValueError:
        return value


def _in_class(name: str, starter: str) -> str:
    return f"Solution.{name}" if "class Solution" in starter else str(name)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) + "\n" if isinstance(value, list) else as_text(value)


ROLL_COLUMNS = ("case_type", "test_cases", "test_case_function")
CASE_TYPES = ("input", "assert", "pytest", "check_based", "text")
RESPONSE = "given_response"
"""Name of the function that returns the text for its tests."""


def roll_task(row: Mapping[str, Any]) -> CodeTask:
    """Return the tests of a row of this form, all of them hidden."""
    cases = parse_column("test_cases", row["test_cases"])
    kind = row.get("case_type") or "input"
    if kind not in CASE_TYPES:
        raise ValueError(f"the case_type {kind!r:.80} where one of {', '.join(CASE_TYPES)} is needed")
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"test_cases {cases!r:.80} where a list with at least one is needed")
    if kind == "input":
        function = row.get("test_case_function")
        if function in (None, "", "None"):
            rows = [{"stdin": case["stdin"], "stdout": case["expected_stdout"]} for case in cases]
            return CodeTask("roll", stdio_suite({}, [], rows))
        how = {"entry_point": as_text(function), "prelude": SOLUTION_PRELUDE}
        return CodeTask("roll", function_suite(how, [], as_calls(cases, "stdin", "expected_stdout")))
    if kind == "check_based":
        names = {str(case["entry_point"]) for case in cases}
        befores = {as_text(case.get("import_prefix") or "") for case in cases}
        if len(names) > 1 or len(befores) > 1:
            raise ValueError(f"cases of several functions, {sorted(names)!r:.80}, or import prefixes")
        entry, before = names.pop(), befores.pop()
        suites = [human_eval_suite({"entry_point": entry, "test": case["assert_code"]}) for case in cases]
        hidden = tuple(test for suite in suites for test in suite.hidden)
        suite = AssertSuite(
            (entry,), hidden=hidden, prelude=TEST_PRELUDE + before, solution_prelude=SOLUTION_PRELUDE + before
        )
        return CodeTask("roll", suite)
    sources = [as_text(case["assert_code"] if isinstance(case, Mapping) else case) for case in cases]
    if kind == "text":
        # The text is passed as a value and never becomes part of a source.
        without = [source for source in sources if "{response}" not in source]
        if without:
            raise ValueError(f"assert_code without {{response}}, {without[0]!r:.80}")
        sources = [source.replace("{response}", f"{RESPONSE}()") for source in sources]
        tests = [test for source in sources for test in split_tests(source, [RESPONSE])]
        suite = AssertSuite((RESPONSE,), hidden=tuple(map(AssertTest, tests)), prelude=TEST_PRELUDE)
        return CodeTask("roll", suite, of_text=True)
    return CodeTask("roll", strongest_suite(sources))


_EXAMPLES = (
    'as {"entry_point": "add", "visible": [{"args": [1, 2], "expected": 3}], "hidden": [...]}, '
    'or with tests {"stdin": "1 2", "stdout": "3"}'
)


@dataclass(frozen=True, slots=True)
class RowForm:
    """One format of tests in datasets."""

    marks: tuple[set[str], ...]
    """Sets of columns, of which a row of this form has one."""
    columns: tuple[str, ...]
    """All columns that it reads."""
    read: Callable[[Mapping[str, Any]], CodeTask]
    """Raises an error of those that `code_task` makes a DataError if it cannot."""
    read_strictly: Callable[[Mapping[str, Any]], CodeTask] | None = None
    """Reads it with types and text that count, where the form's own evaluator is more lenient."""
    read_officially: Callable[[Mapping[str, Any]], CodeTask] | None = None
    """Reads it as the form's own evaluator does, where that is too lenient for a reward."""


_SHARED = ("entry_point", "prelude", "starter_code")
FORMS = {
    "roll": RowForm(({"test_cases"},), ROLL_COLUMNS, roll_task),
    "plain": RowForm(
        ({"visible"}, {"hidden"}, {"tests"}),
        ("mode", "visible", "hidden", "tests", "names", "comparison", "text_mode", *_SHARED),
        plain_task,
    ),
    "livecodebench": RowForm(
        ({"public_test_cases"}, {"private_test_cases"}),
        ("public_test_cases", "private_test_cases", "metadata", "func_name", "starter_code"),
        live_code_bench,
        partial(live_code_bench, strict=True),
    ),
    "apps": RowForm(
        ({"input_output"}, {"inputs", "outputs"}),
        ("input_output", *APPS_COLUMNS),
        apps,
        partial(apps, strict=True),
        partial(apps, official=True),
    ),
    "humaneval": RowForm(({"test", "entry_point"},), ("test", "entry_point", "prompt"), human_eval),
    "mbpp": RowForm(
        ({"test_list"},), ("test_list", "challenge_test_list", "test_setup_code", "test_imports", "code"), mbpp
    ),
}
"""Forms by name; a row has the first form whose marks it has."""


def code_task(
    label: Any, row: Mapping[str, Any] | None = None, *, strict: bool = False, official: bool = False
) -> CodeTask:
    """Return the tests of a task, from its label and the other columns of its row.

    Args:
        label: the tests, or a part of the row.
        row: the other columns.
        strict: compare rows of APPS and LiveCodeBench by types and text.
        official: compare rows of APPS as its evaluator does, for scores: it pays for words in any order.

    Raises:
        DataError: they have no known form, lack what the form needs, or have no test.
    """
    try:
        own = _label_columns(arrays_as_lists(label))
    except RecursionError as error:
        raise DataError("code_task: expected a label of a few levels, got one nested too deep.") from error
    columns = {**(row or {}), **own}
    name = _marked(own) or form_of(columns)
    form = FORMS[name]
    try:
        columns |= {column: arrays_as_lists(columns[column]) for column in form.columns if column in columns}
        read = form.read_strictly if strict else form.read_officially if official else form.read
        task = (read or form.read)(columns)
        for field in ("prelude", "solution_prelude"):
            prelude = getattr(task.suite, field, "")
            try:
                parse_source(prelude)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"{prelude[-80:]!r} before the solution where Python is needed ({error})") from error
        return task
    except DataError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        given = [f"{column}: {type(columns[column]).__name__}" for column in form.columns if column in columns]
        raise DataError(
            f"code_task: expected a row of the form {name} ({', '.join(FORMS[name].columns)}), got {problem:.400} "
            f"({', '.join(given)}). "
            f"Fix or remove the row{f'; a label is {_EXAMPLES}' * (name == 'plain')}."
        ) from error


def comparison(where: str, *, strict: bool, official: bool) -> dict[str, bool]:
    """Return the options of `code_task`; ConfigError if both are set."""
    if strict and official:
        raise ConfigError(f"{where}.official: expected False with strict, got {official!r}. Set one of them.")
    return {"strict": strict, "official": official}


def question_of(prompt: Any) -> str:
    """Return a prompt's last text by the user, or the prompt itself if it is a text.

    Helpers in it run beside the tests, so it never contains what the policy wrote or a tool returned.
    """
    if isinstance(prompt, str):
        return prompt
    texts = [message.get("content") for message in prompt if message.get("role") == "user"]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")


def program_of(task: CodeTask, text: str, prompt: str | Sequence[Message]) -> str | None:
    """Return the program of a response to a prompt, see `extract_code`; None if it has none.

    If the tests check the text, it is a program that returns the text of the response.
    """
    if not task.of_text:
        names = getattr(task.suite, "names", ()) or (getattr(task.suite, "entry_point", ""),)
        return extract_code(text, names[0].partition(".")[0], prompt)
    final = final_text(text, prompt)
    return f"def {RESPONSE}():\n    return {final!r}\n" if final and len(final) < MAX_CODE_CHARS else None


def form_of(columns: Mapping[str, Any]) -> str:
    """Return the form of a row, by its columns.

    Raises:
        DataError: it has no known form.
    """
    if (name := _marked(columns)) is not None:
        return name
    known = "; ".join(f"{name}: {', '.join(form.columns)}" for name, form in FORMS.items())
    raise DataError(
        f"code_task: expected the tests of a task, by the columns of a known form ({known}), got the columns "
        f"{sorted(map(str, columns))!r:.200}. Put the tests into the label, {_EXAMPLES}; "
        "or leave the label out with --label_key ''."
    )


def _marked(columns: Mapping[str, Any]) -> str | None:
    names = (name for name, form in FORMS.items() if any(marks <= columns.keys() for marks in form.marks))
    return next(names, None)


def _label_columns(label: Any) -> Mapping[str, Any]:
    """Return a label as columns: an object, a list of tests or asserts, JSON of these, or the source of a `check`."""
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        label = parse_column("label", label)
    if isinstance(label, Mapping):
        return label
    if isinstance(label, list):
        if label and all(isinstance(one, Mapping) and {"assert_code", "expected_stdout"} & one.keys() for one in label):
            return {"test_cases": label}
        return {"tests": label} if all(isinstance(one, Mapping) for one in label) else {"test_list": label}
    if isinstance(label, str) and "def check(" in label:
        return {"test": label}
    return {}
