"""Define the task of a row of programming problems, and read columns that all forms of rows share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.errors import DataError
from agentenv.sandbox.grading import TestSuite


@dataclass(frozen=True, slots=True)
class CodeTask:
    """The tests of a row."""

    form: str
    """plain, livecodebench, apps, humaneval, mbpp or roll."""
    suite: TestSuite
    examples: tuple[str, ...] = ()
    """Visible tests to show below the prompt, if the prompt has none."""
    starter_code: str = ""
    """Code to show there, too."""
    of_text: bool = False
    """True if the tests check the text of the response, which needs no program; see `forms`."""


TEST_PRELUDE = "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string\n"
"""Imports that tests of contest problems assume, none of which can be confused with the solution's names."""
SOLUTION_PRELUDE = f"""\
{TEST_PRELUDE}from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""Imports that solutions of contest problems assume."""


def parse_column(name: str, value: Any) -> Any:
    """Return the value of a column that may hold JSON.

    Raises:
        DataError: it is text, but not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"code_task: {name}: expected JSON, got {value!r:.60} ({error}). Fix the row.") from error


def as_text(value: Any) -> str:
    """Return a value that is text already.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} where text is needed")
    return value


def as_items(value: Any) -> list[Any]:
    """Return the members of a list, or of an array.

    Raises:
        TypeError: it is a text or an object, whose characters or keys are not meant, or has no members.
    """
    if isinstance(value, str | bytes | Mapping):
        raise TypeError(f"{value!r:.80} where a list is needed")
    return list(value)


def first_visible(tests: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split tests into the first one, to be visible, and the others, to be hidden; a single test is hidden."""
    cut = 1 if len(tests) > 1 else 0
    return list(tests[:cut]), list(tests[cut:])
