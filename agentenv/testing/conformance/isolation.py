"""The property `isolation`: episodes that run at the same time do not affect each other."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import sqlite3
import stat
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from types import MappingProxyType, ModuleType
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.testing.conformance.cases import EpisodeCase, yielding
from agentenv.testing.conformance.context import ConformanceContext, NotApplicable
from agentenv.testing.conformance.problems import (
    Problem,
    attribute_at,
    place_of_method,
    problem_at,
    relative_path,
    unique,
)
from agentenv.testing.conformance.records import culprit, difference, own_classes
from agentenv.testing.conformance.system_calls import FILE_EVENTS, PROCESS_EVENTS, Event, record_events
from agentenv.testing.shifted_clock import modules_of

NUM_TOGETHER = 32
_NUM_ALONE = 8
"""An environment that draws from few values may repeat an episode by luck."""
_PLAIN = (
    list, dict, set, bytearray, deque, Counter, defaultdict, OrderedDict, MappingProxyType, tuple, frozenset, int,
    float, str, bool, type(None),
)  # fmt: skip
_OTHER_SEED = 7_919
_REPLACED = (int, float, str, bool, type(None))
"""Immutable values change only by `cls.name = …`, which is deliberate, so they are a problem only if episodes differ.
`self.name.append` on a list of the class is the usual mistake."""
SHARED_ON_PURPOSE = ("cache", "lock", "memo", "pool", "client", "stats", "metric", "log")
"""Parts of names whose values episodes may change."""
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, Counter, defaultdict, OrderedDict, MappingProxyType)
_ATOMS = (int, float, str, bytes, bool, type(None), bytearray)
_MAX_DEPTH = 8


def isolation(context: ConformanceContext) -> list[Problem]:
    """Each of 32 simultaneous episodes is the same as alone, and none changes what all of them share."""
    context.require_steps()
    cls = context.agent_cls
    before = _class_state(cls), _module_state(cls)
    records = context.separate_episodes
    filled = shared_state(cls)  # after one episode of each case, so that what is loaded once is there
    with record_events(PROCESS_EVENTS, place_of_method(cls, "step")[0]) as events:
        together = context.run(_together(context))
    differs = None  # the method and the first fact in which an episode differs from the one run alone
    for index, trajectory in together:
        found = difference(records[index], trajectory, ("alone", f"among {NUM_TOGETHER}"))
        if found is not None:
            differs = culprit(found, trajectory), f"{found} (the policy {context.cases[index].policy!r})"
            break
    changed = [name for name, value in _class_state(cls).items() if before[0].get(name, value) != value]
    changed = [name for name in changed if differs or not isinstance(getattr(cls, name, None), _REPLACED)]
    effect = f"; {differs[1]}" if differs else ""
    problems = []
    for name in changed:
        file, line = attribute_at(cls, name)
        expected, got = "a class attribute that episodes do not change", "another value after episodes than before"
        fix = f"Set it in __init__ (`self.{name} = …`): all episodes of a process share class attributes. Data that "
        fix += "is the same for all of them may stay there with `cache` in its name."
        problems.append(Problem(relative_path(file), line, f"{cls.__name__}.{name}", expected, got + effect, fix))
    shared = [*_of_process(cls, events), *_of_shared_state(cls, filled)]
    if differs and not problems:
        if context.run(_differs_alone(context, records)):
            if shared:
                return unique(shared)  # the cause
            raise NotApplicable("episodes also differ when run alone; fix `determinism` first")
        meanwhile = [name for name, value in _module_state(cls).items() if before[1].get(name, value) != value]
        hint = f" Check {', '.join(meanwhile)} of the module, which changed meanwhile." if meanwhile else ""
        expected = f"the same episode alone and among {NUM_TOGETHER}"
        fix = f"Keep the state of an episode on `self`, set in __init__ or reset.{hint}"
        problems.append(problem_at(cls, differs[0], expected, differs[1], fix))
    return unique(problems or shared or context.run(_of_files(context)))


def _of_process(cls: type[Any], events: Sequence[Event]) -> Iterator[Problem]:
    """Return the problem of code that changes the working directory, or a variable to more than one value."""
    own = [event for event in events if event.line]
    values = {event.subject: {each.description for each in own if each.subject == event.subject} for event in own}
    for event in own:
        if event.description.startswith("changes the working") or len(values[event.subject]) > 1:
            expected, got = "a process that episodes do not change", f"code that {event.description}"
            fix = "All episodes of a process share it: pass a folder or a value as an argument instead."
            yield replace(problem_at(cls, "step", expected, got, fix), line=event.line)
            return


def _of_shared_state(cls: type[Any], before: Mapping[str, str]) -> Iterator[Problem]:
    """Return the problem of each variable that the same episodes change once more."""
    for name, text in shared_state(cls).items():
        if before.get(name, text) != text:
            at = next((i for i, (a, b) in enumerate(zip(before[name], text, strict=False)) if a != b), 0)
            was, now = before[name][max(0, at - 20) : at + 40], text[max(0, at - 20) : at + 40]
            expected, got = f"`{name}` of the module unchanged by episodes", f"{was!r} changed to {now!r}"
            fix = "All episodes of a process share it: keep the state of an episode on `self`, and copy nested values "
            fix += "with copy.deepcopy. Data that is the same for all of them may stay there with `cache` in its name."
            yield problem_at(cls, "step", expected, got, fix)


async def _of_files(context: ConformanceContext) -> list[Problem]:
    """Return the problem of a file that episodes of different seeds write."""
    cls = context.agent_cls
    written: list[dict[str, tuple[int, float]]] = []
    for other in (1, 2):
        with record_events(FILE_EVENTS, place_of_method(cls, "step")[0]) as events:
            for case in context.cases:
                await context.episode(replace(case, seed=case.seed + _OTHER_SEED * other))
        own = [event for event in events if event.line and event.subject.rpartition(".")[2] != "log"]
        written.append({event.subject: (event.line, found) for event in own if (found := _written_at(event))})
    for path, (line, at) in written[0].items():
        if path in written[1] and written[1][path][1] > at:
            fix = "Write to a folder of the episode (tempfile.mkdtemp in `reset`, removed in `close`)."
            expected, got = "files that only one episode writes", f"{path!r}, which episodes of all seeds write"
            return [replace(problem_at(cls, "step", expected, got, fix), line=line)]
    return []


def _written_at(event: Event) -> float:
    """Return when the file of an event was written last; 0 if the event does not write it."""
    writes = event.description == "sqlite" or bool(set(event.description) & set("wx+"))
    try:
        found = os.stat(event.subject)  # of a folder: where a temporary file without a name is
        return found.st_mtime if writes and stat.S_ISREG(found.st_mode) else 0.0
    except (OSError, ValueError):
        return 0.0


async def _together(context: ConformanceContext) -> list[tuple[int, Trajectory]]:
    numbered = list(islice(cycle(enumerate(context.cases)), NUM_TOGETHER))

    async def one(index: int, case: EpisodeCase, late: int) -> tuple[int, Trajectory]:
        for _ in range(late % 7):
            await asyncio.sleep(0)
        return index, await context.episode(case, engine=yielding(case, context.tokenizer))

    return await asyncio.gather(*(one(index, case, late) for late, (index, case) in enumerate(numbered)))


async def _differs_alone(context: ConformanceContext, records: list[Trajectory]) -> bool:
    """Return True if episodes also differ when nothing else runs."""
    for _ in range(_NUM_ALONE):
        for case, one in zip(context.cases, records, strict=True):
            again = await context.episode(case, engine=yielding(case, context.tokenizer))
            if difference(one, again, ("", "")):
                return True
    return False


def _class_state(cls: type[Any]) -> dict[str, str]:
    """Return the values of builtin types in the bodies of the class and its bases, as text."""
    return {name: text for base in reversed(own_classes(cls)) for name, text in _plain(vars(base)).items()}


def _module_state(cls: type[Any]) -> dict[str, str]:
    module = sys.modules.get(own_classes(cls)[0].__module__) if own_classes(cls) else None
    return _plain(vars(module)) if module is not None else {}


def _plain(names: Any) -> dict[str, str]:
    """Return the values of builtin types among these names, as text; changes in other types cannot be judged."""
    own = {name: value for name, value in dict(names).items() if not name.startswith("__")}
    shared = {name for name in own if any(word in name.lower() for word in SHARED_ON_PURPOSE)}
    return {name: repr(value) for name, value in own.items() if type(value) in _PLAIN and name not in shared}


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
