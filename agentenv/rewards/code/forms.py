"""Rows of datasets to suites of tests: our own plain form, LiveCodeBench, APPS, HumanEval, MBPP and ROLL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.errors import DataError
from agentenv.rewards.code.benchmark_rows import APPS_COLUMNS, apps, human_eval, live_code_bench, mbpp
from agentenv.rewards.code.extract import MAX_CODE_CHARS, extract_code
from agentenv.rewards.code.plain import plain_task
from agentenv.rewards.code.roll_rows import ROLL_COLUMNS, program_of_text, roll_task
from agentenv.rewards.code.task import CodeTask, Form, parsed
from agentenv.rewards.text import final_text

_EXAMPLES = (
    'as {"entry_point": "add", "visible": [{"args": [1, 2], "expected": 3}], "hidden": [...]}, '
    'or with tests {"stdin": "1 2", "stdout": "3"}'
)
_SHARED = ("entry_point", "prelude", "starter_code")
FORMS = {
    "roll": Form(({"test_cases"},), ROLL_COLUMNS, roll_task),
    "plain": Form(
        ({"visible"}, {"hidden"}, {"tests"}),
        ("mode", "visible", "hidden", "tests", "names", "comparison", "text_mode", *_SHARED),
        plain_task,
    ),
    "livecodebench": Form(
        ({"public_test_cases"}, {"private_test_cases"}),
        ("public_test_cases", "private_test_cases", "metadata", "func_name", "starter_code"),
        live_code_bench,
    ),
    "apps": Form(({"input_output"}, {"inputs", "outputs"}), ("input_output", *APPS_COLUMNS), apps),
    "humaneval": Form(({"test", "entry_point"},), ("test", "entry_point", "prompt"), human_eval),
    "mbpp": Form(
        ({"test_list"},), ("test_list", "challenge_test_list", "test_setup_code", "test_imports", "code"), mbpp
    ),
}
"""By name; the first that a row has the marks of is its form."""


def code_task(label: Any, row: Mapping[str, Any] | None = None) -> CodeTask:
    """The tests of a task: of its label, and of the other columns of its row.

    Raises:
        DataError: they have no known form, or not what it needs, or no test.
    """
    own = _label_columns(label)
    columns = {**(row or {}), **own}
    name = _marked(own) or form_of(columns)
    try:
        return FORMS[name].read(columns)
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"code_task: expected a row of the form {name} ({', '.join(FORMS[name].columns)}), got {told:.400}. "
            f"Mend or remove the row{f'; a label is {_EXAMPLES}' * (name == 'plain')}."
        ) from error


def program_of(task: CodeTask, text: str) -> str | None:
    """The program of a response, None where it has none: what `extract_code` finds.

    Where the tests are of the text it is one that says what the response says.
    """
    if not task.of_text:
        names = getattr(task.suite, "names", ()) or (getattr(task.suite, "entry_point", ""),)
        return extract_code(text, names[0].partition(".")[0])
    said = final_text(text)
    return program_of_text(said) if said and len(said) < MAX_CODE_CHARS else None


def form_of(columns: Mapping[str, Any]) -> str:
    """The form of a row, by the columns that it has.

    Raises:
        DataError: it has those of none.
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
    """A label as columns: an object, a list of tests or asserts, JSON of these, or the source of a `check`."""
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        label = parsed("label", label)
    if isinstance(label, Mapping):
        return label
    if isinstance(label, list):
        if label and all(isinstance(one, Mapping) and {"assert_code", "expected_stdout"} & one.keys() for one in label):
            return {"test_cases": label}
        return {"tests": label} if all(isinstance(one, Mapping) for one in label) else {"test_list": label}
    if isinstance(label, str) and "def check(" in label:
        return {"test": label}
    return {}
