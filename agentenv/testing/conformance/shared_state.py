"""What episodes of a process share: variables of modules, defaults of arguments, closures, and the process itself."""

from __future__ import annotations

import inspect
import random
import sqlite3
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from agentenv.testing.conformance.records import own_classes
from agentenv.testing.shifted_clock import modules_of

SHARED_ON_PURPOSE = ("cache", "lock", "memo", "pool", "client", "stats", "metric", "log")
"""Parts of names whose values episodes may change."""
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, Counter, defaultdict, OrderedDict, MappingProxyType)
_ATOMS = (int, float, str, bytes, bool, type(None), bytearray)
_MAX_DEPTH = 8


def shared_state(cls: type[Any]) -> dict[str, str]:
    """Return the contents of what episodes of a class share, as text by name, in the modules that define them.

    Only what can be changed in place is there, and not what has a name of `SHARED_ON_PURPOSE`.
    """
    modules = modules_of(own_classes(cls))
    names = {module.__name__ for module in modules}
    found: dict[str, str] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if name.startswith("__") or _on_purpose(name) or isinstance(value, (ModuleType, *_ATOMS)):
                continue
            functions: Iterable[tuple[str, Any]] = ((name, value),)
            if inspect.isclass(value):
                functions = ((f"{name}.{key}", each) for key, each in list(vars(value).items()))
            for label, each in functions:
                if isinstance(each, types.FunctionType):
                    found |= _of_function(label, each, names)
            if not isinstance(value, types.FunctionType) and not inspect.isclass(value):
                found[name] = _text(value, names, 0, set())
    return {name: text for name, text in found.items() if text}


def _on_purpose(name: str) -> bool:
    return any(word in name.lower() for word in SHARED_ON_PURPOSE)


def _of_function(label: str, function: types.FunctionType, names: set[str]) -> dict[str, str]:
    """Return the defaults and the closure of a function of these modules, as text by name."""
    if function.__module__ not in names:
        return {}
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
    found = {}
    for name, value in (defaults | (function.__kwdefaults__ or {})).items():
        if not isinstance(value, _ATOMS) and not _on_purpose(name):
            found[f"{label}, the default of `{name}`"] = _text(value, names, 0, set())
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = _content(cell)
        if not isinstance(value, _ATOMS) and not _on_purpose(name):
            found[f"{label}, the variable `{name}` around it"] = _text(value, names, 0, set())
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _text(value: Any, names: set[str], depth: int, seen: set[int]) -> str:
    """Return the content of a value as text; empty for objects that cannot be judged."""
    kind = type(value)
    if kind in _ATOMS:
        return repr(value)
    if id(value) in seen or depth > _MAX_DEPTH:
        return "…"
    seen = {*seen, id(value)}
    if kind in _LISTS:
        return f"[{', '.join(_text(each, names, depth + 1, seen) for each in value)}]"
    if kind in _SETS:
        return f"{{{', '.join(sorted(_text(each, names, depth + 1, seen) for each in value))}}}"
    if kind in _MAPPINGS:
        return _items(value, names, depth, seen)
    if isinstance(value, random.Random):
        return f"Random {hash(value.getstate())}"
    if isinstance(value, sqlite3.Connection):
        return _of_database(value)
    if kind.__module__ in names and isinstance(getattr(value, "__dict__", None), dict):
        return _items(vars(value), names, depth, seen)
    return ""


def _items(value: Mapping[Any, Any], names: set[str], depth: int, seen: set[int]) -> str:
    kept = [(key, each) for key, each in list(value.items()) if not (isinstance(key, str) and _on_purpose(key))]
    return f"{{{', '.join(f'{key!r}: {_text(each, names, depth + 1, seen)}' for key, each in kept)}}}"


def _of_database(database: sqlite3.Connection) -> str:
    try:
        return f"{database.total_changes} changes"
    except sqlite3.Error:  # closed, or of another thread
        return ""
