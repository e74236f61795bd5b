"""Convert rows of datasets to test suites: our own plain form, LiveCodeBench, APPS, HumanEval, MBPP and ROLL's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentenv._util.jsonable import arrays_as_lists
from agentenv._util.syntax import parse_source
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.rules.code import rows
from agentenv.rewards.rules.code.extract import MAX_CODE_CHARS, extract_code
from agentenv.rewards.rules.code.task import CodeTask, parse_column
from agentenv.rewards.rules.text import final_text

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
    "roll": RowForm(({"test_cases"},), rows.ROLL_COLUMNS, rows.roll_task),
    "plain": RowForm(
        ({"visible"}, {"hidden"}, {"tests"}),
        ("mode", "visible", "hidden", "tests", "names", "comparison", "text_mode", *_SHARED),
        rows.plain_task,
    ),
    "livecodebench": RowForm(
        ({"public_test_cases"}, {"private_test_cases"}),
        ("public_test_cases", "private_test_cases", "metadata", "func_name", "starter_code"),
        rows.live_code_bench,
        partial(rows.live_code_bench, strict=True),
    ),
    "apps": RowForm(
        ({"input_output"}, {"inputs", "outputs"}),
        ("input_output", *rows.APPS_COLUMNS),
        rows.apps,
        partial(rows.apps, strict=True),
        partial(rows.apps, official=True),
    ),
    "humaneval": RowForm(({"test", "entry_point"},), ("test", "entry_point", "prompt"), rows.human_eval),
    "mbpp": RowForm(
        ({"test_list"},), ("test_list", "challenge_test_list", "test_setup_code", "test_imports", "code"), rows.mbpp
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
        raise DataError(
            "code_task: expected a label of a few levels, got one nested too deep. Remove the row."
        ) from error
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
    return rows.program_of_text(final) if final and len(final) < MAX_CODE_CHARS else None


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
