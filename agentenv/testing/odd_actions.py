"""Actions that parsers seldom expect: odd numbers and JSON, alone and in place of values in a right action, and code.

The code finds environments that run it in their own process. It has a mark, seen by its name: an attribute that nothing
has, so it changes nothing. Code in another process, as in a sandbox, is not seen.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

from agentenv.testing.tool_calls import calls_with_texts

ODD_NUMBERS = ("\u00b2", "\u00b2 #### \u00b2", "\uff14\uff12")
"""A superscript, of which `isdigit` is true and which `int` refuses, alone and behind a mark; fullwidth digits."""
ODD_JSON = ("[]", "0", "null", '"x"', "```json\n[]\n```", "```json\nnull\n```")
"""JSON that is not an object, alone and in a fence."""
ODD_FLOATS = ("nan", "inf", "-inf", "1e999")
"""Numbers that comparisons with a bound seldom expect."""
ODD_FORMS = (
    "digit", "zero", "nan", "infinite", "no_value", "terms", "signs", "brackets", "nines", "null_values",
    "number_values", "text_values", "list_values", "empty_values", "inner_values", "no_keys", "not_an_object",
    "first_key", "last_key",
)  # fmt: skip
"""Names of what `odd_forms` returns at most."""
TERMS, SIGNS = "1" + "+1" * 1_500, "-" * 5_000 + "1"
"""Expressions whose syntax trees are deeper than a recursion may be: to walk the first, and to parse the second."""
DEPTH = 5_000
"""Number of brackets that is deeper than a recursion may be."""
_VALUE = re.compile(r"(?<![\d.])\d+(?:\.\d+)?(?!.*\d)", re.DOTALL)
_JSON = tuple(re.compile(pattern, re.DOTALL) for pattern in (r"\{.*\}", r"\[.*\]"))
_PATTERN = re.compile(r"[^\s`'\"/]*(?:\\[dwsbDWSB]|\[[^\]\s]+\]|\.[*+])[^\s`'\"/]*")
_BACKTRACKS = "(.+)+@@"
"""A regular expression whose search takes time that is exponential in the length of most texts."""


def odd_forms(gold: str) -> dict[str, str]:
    """Return a right action with odd values: of its numbers, and of a JSON object or list, whose elements are odd."""
    forms: dict[str, str] = {}
    found = _VALUE.search(gold)
    if found is not None:
        before, after = gold[: found.start()], gold[found.end() :]
        values = {"digit": "\u00b2", "zero": "0", "nan": "nan", "infinite": "73914e999", "no_value": "", "terms": TERMS}
        values |= {"signs": SIGNS, "brackets": f"{'(' * DEPTH}{found[0]}{')' * DEPTH}"}
        forms = {name: f"{before}{value}{after}" for name, value in values.items()}
        all_nines = re.sub(r"\d", "9", gold)
        forms |= {"nines": all_nines} if all_nines != gold else {}
    start, end, parsed = _json_in(gold)
    arguments = parsed.get("arguments") if isinstance(parsed, dict) else None
    is_call = isinstance(arguments, dict)
    inner: Any = arguments if is_call else parsed
    if not inner and inner != {}:
        return forms

    def fill(value: Any) -> Any:
        return dict.fromkeys(inner, value) if isinstance(inner, dict) else [value] * len(inner)

    odd = {
        "null_values": fill(None),
        "number_values": fill(7),
        "text_values": fill("x"),
        "list_values": fill(["x"]),
        "empty_values": fill([]),
        "inner_values": _with_lists(inner),
        "no_keys": type(inner)(),
        "not_an_object": [] if isinstance(inner, dict) else {"a": 1},
    }
    if inner and not is_call:  # a call may leave arguments out
        ends = {"first_key": next(iter(inner)), "last_key": [*inner][-1]}
        odd |= {name: {end: inner[end]} if isinstance(inner, dict) else [end] for name, end in ends.items()}
    for name, value in odd.items():
        text = json.dumps({**parsed, "arguments": value} if is_call else value)
        if (form := f"{gold[:start]}{text}{gold[end:]}") not in (gold, *forms.values()):
            forms[name] = form
    return forms


def _json_in(text: str) -> tuple[int, int, Any]:
    """Return the place and the value of the first JSON object or list of a text; None as the value without one."""
    for found in sorted(filter(None, (each.search(text) for each in _JSON)), key=lambda each: each.start()):
        with suppress(ValueError, RecursionError):
            return found.start(), found.end(), json.loads(found[0])
    return 0, 0, None


def _with_lists(value: Any) -> Any:
    """Return a JSON value with a list in place of each text, number, bool and null in it."""
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, list) else ["x"]


def slow_pattern(gold: str) -> str | None:
    """Return a right action with a slow regular expression in place of its last one; None if it has none."""
    found = [*_PATTERN.finditer(gold)]
    if not found:
        return None
    return f"{gold[: found[-1].start()]}{_BACKTRACKS}{gold[found[-1].end() :]}"


# --- code with a mark -------------------------------------------------------------------------------------------------

_MARK = "agentenv_mark_"
_FUNCTION = "def solve(*args):\n    return {0}\nprint({0})\n"
_HEARING: list[Callable[[str, tuple[Any, ...]], None]] = []
_HOOK_ADDED = threading.Event()


def marked(name: str) -> str:
    """Return an expression whose evaluation is recorded as `name`."""
    return f"[].{_MARK}{name}"


def marked_actions() -> dict[str, str]:
    """Return actions with marked code, by name: alone, in the forms of answers, in a fence and in JSON."""
    forms = {
        "alone": "{0}",
        "answer": "The answer is {0}.",
        "box": "\\boxed{{{0}}}",
        "tags": "<answer>{0}</answer>",
        "hashes": "#### {0}",
        "fence": f"```python\n{_FUNCTION}```",
        "program": _FUNCTION,
        "json": '{{"answer": "{0}", "code": "{0}", "expression": "{0}"}}',
    }
    return {name: form.format(marked(name)) for name, form in forms.items()}


def marked_calls(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return an answer with a call of each tool whose texts are marked code, by the name of the mark."""
    calls = calls_with_texts(tools, lambda tool: marked(f"call_{tools.index(tool)}"))
    return {f"call_{index}": call for index, call in enumerate(calls.values())}


def names_in(text: str, names: set[str]) -> list[str]:
    """Return the recorded names whose marked code is in a text."""
    return sorted(name for name in names if marked(name) in text)


@contextmanager
def recorded_marks() -> Iterator[set[str]]:
    """Return a set to which the names of marked code are added that this process runs within the block."""
    names: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "exec" and isinstance(args[0], CodeType):
            names.update(_marks_of(args[0]))

    with heard_audit_events(note):
        yield names


def _marks_of(code: CodeType) -> list[str]:
    """Return the names of the marks in code and in its functions."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _marks_of(each)]
    return inner + [name.removeprefix(_MARK) for name in code.co_names if name.startswith(_MARK)]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    for note in _HEARING:
        note(event, args)


@contextmanager
def heard_audit_events(note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `note` with each audit event of Python within the block: its name and its arguments.

    An audit hook cannot be removed, so one is added at the first use; it does nothing outside of such blocks.
    """
    if not _HOOK_ADDED.is_set():
        _HOOK_ADDED.set()
        sys.addaudithook(_hook)
    _HEARING.append(note)
    try:
        yield
    finally:
        _HEARING.remove(note)
