"""What a row asks of a program, and the reading of columns that all forms of rows share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.errors import DataError
from agentenv.sandbox.grading import TestSuite


@dataclass(frozen=True, slots=True)
class CodeTask:
    """What a row asks for."""

    form: str
    """plain, livecodebench, apps, humaneval, mbpp or roll."""
    suite: TestSuite
    examples: tuple[str, ...] = ()
    """To be shown under the prompt: of visible tests, where the prompt has none."""
    starter_code: str = ""
    """To be shown there, too."""
    of_text: bool = False
    """Whether the tests are of what the response says, and it needs no program: see `roll`."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which datasets write tests."""

    marks: tuple[set[str], ...]
    """Columns of which a row of this form has one set."""
    columns: tuple[str, ...]
    """All that it needs of a row."""
    read: Callable[[Mapping[str, Any]], CodeTask]
    """Raises KeyError, TypeError, ValueError (so DataError and ConfigError) or AttributeError where it cannot."""


TEST_PRELUDE = "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string\n"
"""What tests in sets of contest problems take for granted, none of which can be taken for the solution's."""
_PRELUDE = f"""\
{TEST_PRELUDE}from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""


def prelude_for(*names: str) -> str:
    """What solutions in these sets take for granted, without these names: `math.gcd` is nobody's solution of `gcd`."""
    firsts = sorted({name.split(".")[0] for name in names} | {name.split(".")[-1] for name in names})
    return f"{_PRELUDE}for _name in {firsts!r}:\n    globals().pop(_name, None)\n"


def parsed(name: str, value: Any) -> Any:
    """The value of a column that may hold JSON.

    Raises:
        DataError: it is text, and no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"code_task: {name}: expected JSON, got {value!r:.60} ({error}). Mend the row.") from error


def as_text(value: Any) -> str:
    """A value that is text already.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} where text is needed")
    return value


def first_visible(tests: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The first test to be shown, the others to be kept; a lone one is kept."""
    cut = 1 if len(tests) > 1 else 0
    return list(tests[:cut]), list(tests[cut:])
