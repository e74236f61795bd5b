"""Finds environments that run code of a policy in their own process: actions have code with a mark, seen by its name.

The code reads an attribute that nothing has, so it changes nothing. Code in another process, as in a sandbox, is not
seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from agentenv.testing.tool_calls import calls_with_texts

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
