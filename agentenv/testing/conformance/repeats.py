"""The properties of repeated episodes: `determinism`, `portability` to another process, and `isolation`."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from agentenv._util.jsonable import jsonable
from agentenv.core.trajectory import Trajectory
from agentenv.engines.models import resolve_model
from agentenv.engines.scripted import Request, ScriptedEngine
from agentenv.episode.failures import FAILED_SERVICE
from agentenv.errors import InfraError
from agentenv.testing.conformance.call_watch import CallWatch
from agentenv.testing.conformance.cases import EpisodeCase, yielded
from agentenv.testing.conformance.context import (
    IMPORT_LIMITS,
    ConformanceContext,
    ConformanceOptions,
    NotApplicable,
    written_files,
)
from agentenv.testing.conformance.probes import FILE_EVENTS, PROCESS_EVENTS, Event, record_events, shortened_sleeps
from agentenv.testing.conformance.problems import Problem, attribute_at, own_files, problem_at, relative_path, unique
from agentenv.testing.diffs import culprit, difference, facts_of, first_difference, same_number
from agentenv.testing.shifted_clock import elapsing_clock, modules_of, own_classes, reads_clocks, shifted_clock
from agentenv.testing.tool_calls import calls_with_texts

_DELAY_S = 61.0
"""Time that an engine with much else to do may take for an action; an episode may have a deadline of an hour."""
_DRAWS = re.compile(r"\b(np|numpy)\.random\.\w|\brandom\.(?!Random\b)\w+\(|\btorch\.(manual_seed|rand)")


def determinism(context: ConformanceContext) -> list[Problem]:
    """Check that the same task, seed and actions produce the same episode, without global random generators."""
    context.require_steps()
    drawn = context.run(_drawn(context))
    if drawn:
        return drawn  # the cause if episodes differ
    records = context.separate_episodes
    again = context.run(context.run_separately(context.cases[::-1]))[::-1]
    problems = []
    for case, one, other in zip(context.cases, records, again, strict=True):
        found = difference(one, other, ("the first time", "the second time"))
        if found is not None:
            expected = "the same episode for the same task, seed and actions"
            got = f"{found} (the policy {case.policy!r})"
            fix = "Draw from `Random(states['seed'])`; do not use clocks, earlier episodes or the order of sets."
            if context.service_errors & {one.error, other.error}:
                fix = FAILED_SERVICE
            elif any(turn.action.count("<tool_call>") > 1 for turn in other.turns):
                fix += " `async def` tools that one action calls run at the same time: let one wait for the other."
            problems.append(problem_at(context.agent_cls, culprit(found, other), expected, got, fix))
    return problems or _with_delays(context, records)


def _with_delays(context: ConformanceContext, records: list[Trajectory]) -> list[Problem]:
    """Return the problem of a reward or score that differs if more time passes before each action.

    An episode may be cut off after some time: what differs then is not judged.
    """
    cls, modules = context.agent_cls, modules_of(context.agent_cls)
    if not reads_clocks(modules):
        return []
    for case, one in zip(context.cases, records, strict=True):
        other = context.run(_delayed(context, case, modules))
        for number, (turn, later) in enumerate(zip(one.turns, other.turns, strict=False), 1):
            if turn.result is None or later.result is None or later.result.truncated or turn.result.truncated:
                break
            for name in ("reward", "score"):
                was, now = getattr(turn.result, name), getattr(later.result, name)
                if not same_number(was, now):
                    expected = f"the same {name} if {_DELAY_S:g} s more pass before each action"
                    got = f"{now!r} for {was!r} at turn {number} (the policy {case.policy!r})"
                    fix = "Count turns or tokens: the time depends on the engine and on what else it serves."
                    return [problem_at(cls, "step", expected, got, fix)]
    return []


async def _delayed(context: ConformanceContext, case: EpisodeCase, modules: Sequence[ModuleType]) -> Trajectory:
    """Return the trajectory of a case in which the clocks of modules jump before each action."""
    with elapsing_clock(modules) as add:

        async def around(agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
            if method == "step":
                add(_DELAY_S)
            return await work

        return await context.episode(case, source=context.recording_source([], around))


async def _drawn(context: ConformanceContext) -> list[Problem]:
    """Return the problems of methods that change the state of a global generator."""
    cls, problems = context.agent_cls, list[Problem]()

    async def around(agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        before = _generators()
        value = await work
        for name, state in _generators().items():
            if before.get(name, state) != state:
                expected, line = f"no use of the global generator `{name}`", _line_of_draw(cls, method)
                fix = "Draw from a generator of the episode, `Random(states['seed'])`: other code uses the global one."
                problems.append(problem_at(cls, method, expected, "a changed state", fix, line=line))
        return value

    for case in context.cases:
        await context.episode(case, source=context.recording_source([], around))
        if problems:
            break
    return problems


def _line_of_draw(cls: type[Any], method: str) -> int:
    """Return the line that draws from a global generator, in a method or else in its class; 0 if none is found."""
    for part in (getattr(cls, method, cls), *own_classes(cls)):
        with suppress(TypeError, OSError):
            lines, first = inspect.getsourcelines(part)
            for number, line in enumerate(lines, first):
                if _DRAWS.search(line):
                    return number
    return 0


def _generators() -> dict[str, Any]:
    """Return the states of the global generators of all imported modules."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()  # type: ignore[union-attr]
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    if hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]
    return states


# --- portability ------------------------------------------------------------------------------------------------------

_CODE = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    from agentenv.testing.conformance.repeats import run_elsewhere
    run_elsewhere(*pickle.load(file), sys.argv[2], shifts_clock=sys.argv[3] == "shifted")
"""
_SAME = "the same episode"
_FIXES = {
    "at another time": "Take the time from the row or from `states['seed']`; measure durations with time.monotonic().",
    "in another time zone": "Name the zone: `datetime.fromtimestamp(seconds, UTC)`.",
    "with another PYTHONHASHSEED": "Sort a set before its order matters, and use zlib.crc32 or hashlib, not hash().",
    "in another working directory": "Build paths from Path(__file__).parent, or take them as arguments.",
    "in another process": "Do not use process ids, ids of objects, or what earlier episodes, also of other rows, left "
    "in the module or class.",
}
_HASH_SEEDS = ("1", "2", "3")
"""A small set may have the same order with two seeds."""
_OTHER_ZONE = {"TZ": "XXX-13:45"}
_LIBRARY = ("<frozen os>", "<frozen _collections_abc>", os.__file__, inspect.getfile(Mapping))
Reads = dict[tuple[str, str], int]
"""Line of the first read of an environment variable, by its name and the file that reads it."""


@dataclass(frozen=True)
class _Elsewhere:
    """What another process reports: the facts of its episodes and rows, or its error."""

    episodes: list[dict[str, Any]]
    reads: Reads
    error: str = ""
    clock_reads: tuple[tuple[str, int], ...] = ()
    """Files and lines that have read the time of day, if it was shifted."""


def portability(context: ConformanceContext) -> list[Problem]:
    """An episode is the same with another hash seed, working directory, time zone, date, and environment variables."""
    context.require_steps()
    here, others = _Elsewhere(_facts(context), {}), context.cases_of_others
    with tempfile.TemporaryDirectory() as folder:
        for seed in _HASH_SEEDS:
            before = others if seed == _HASH_SEEDS[-1] else []
            there = _run(context, seed, folder, _OTHER_ZONE, shifts_clock=True, before=before)
            if there.error and before:  # they may take too long
                others = []
                there = _run(context, seed, folder, _OTHER_ZONE, shifts_clock=True)
            if there.error or _first(here, there):
                return [_cause(context, here, there, seed, folder)]
        files = {inspect.getfile(cls) for cls in own_classes(context.agent_cls)}
        for (name, file), line in there.reads.items():
            if file not in files or name == "PYTHONHASHSEED":
                continue
            other = None if name in os.environ else "1"
            changed = _run(context, seed, folder, {**_OTHER_ZONE, name: other}, shifts_clock=True, before=others)
            failed = changed.error or any(facts["error"] for facts in changed.episodes)
            found = None if failed else _first(there, changed)  # an error that names the variable is fine
            if found:
                where = f"{context.agent_cls.__name__}.{culprit(found)}"
                got = f"{found} where the variable is {'not set' if other is None else other!r}"
                fix = "Take it as an argument of the constructor: a run records --env_kwargs, but no variables."
                expected = f"{_SAME} for any value of the environment variable {name}"
                return [Problem(relative_path(file), line, where, expected, got, fix)]
    return []


def _cause(context: ConformanceContext, here: _Elsewhere, there: _Elsewhere, seed: str, folder: str) -> Problem:
    """Return the problem of a difference, which names the first setting that causes it alone."""
    if determinism(context):
        raise NotApplicable("episodes also differ in one process; fix `determinism` first")
    same = _run(context, "0")
    if same.error:
        raise NotApplicable(f"another process cannot load it: {same.error}")
    return (
        _problem(context, same, _run(context, seed), "with another PYTHONHASHSEED")
        or _problem(context, same, _run(context, "0", folder), "in another working directory")
        or _problem(context, same, _run(context, "0", shifts_clock=True), "at another time")
        or _problem(context, same, _run(context, "0", variables=_OTHER_ZONE), "in another time zone")
        or _problem(context, here, there, "in another process")
        or problem_at(context.agent_cls, "step", _SAME, there.error, "Fix it.")
    )


def _problem(context: ConformanceContext, one: _Elsewhere, other: _Elsewhere, when: str) -> Problem | None:
    """Return the problem of two processes with different episodes; None if they have the same."""
    found = other.error or _first(one, other)
    if not found:
        return None
    method = "step" if other.error else culprit(found)
    problem = problem_at(context.agent_cls, method, f"{_SAME} {when}", found, _FIXES[when])
    own = [line for file, line in other.clock_reads if relative_path(file) == problem.file]
    return replace(problem, line=own[0]) if own else problem


def _first(one: _Elsewhere, other: _Elsewhere) -> str | None:
    """Return a description of the first difference between the episodes of two processes."""
    for mine, theirs in zip(one.episodes, other.episodes, strict=False):
        found = first_difference(mine, theirs, ("here", "there"))
        if found:
            return f"{found}, because of {theirs['error']}" if theirs["error"] and not mine["error"] else found
    return None


def _run(
    context: ConformanceContext,
    hash_seed: str,
    folder: str | None = None,
    variables: Mapping[str, str | None] = {},
    *,
    shifts_clock: bool = False,
    before: Sequence[EpisodeCase] = (),
) -> _Elsewhere:
    """Run the episodes of all cases in a new process: with a hash seed, in a folder, with variables, at a time.

    Those of `before`, of other rows, come first, so that what they leave for others shows.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    options = context.options if folder is None else _with_absolute_paths(context.options)
    environ = {**os.environ, **variables, "PYTHONHASHSEED": hash_seed}
    with tempfile.TemporaryDirectory() as files:
        request, answer = Path(files, "request"), Path(files, "answer")
        try:
            # In the opposite order, so that what an episode leaves for another one shows.
            request.write_bytes(pickle.dumps(paths) + pickle.dumps((options, context.cases[::-1], before)))
        except (pickle.PickleError, TypeError, AttributeError) as error:
            raise NotApplicable(f"another process cannot load it: {error}") from error
        command = [sys.executable, "-c", _CODE, str(request), str(answer), "shifted" if shifts_clock else "as it is"]
        kept = {name: value for name, value in environ.items() if value is not None}
        limit_s = context.options.step_timeout_s * IMPORT_LIMITS
        try:
            done = subprocess.run(command, env=kept, cwd=folder, capture_output=True, timeout=limit_s, check=False)
            last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            last = f"no end within {limit_s:g} s"
        if not answer.exists():
            return _Elsewhere([], {}, last)
        episodes, reads, clock_reads, outage = pickle.loads(answer.read_bytes())
        if outage is not None:
            raise InfraError(outage)
        return _Elsewhere([*episodes[-2::-1], *episodes[-1:]], reads, clock_reads=clock_reads)


def _with_absolute_paths(options: ConformanceOptions) -> ConformanceOptions:
    """Return the options with absolute paths of the existing files that they name, also as FILE.py:NAME."""

    def absolute(value: Any) -> Any:
        if isinstance(value, Mapping):  # a reward with options has its name as the key
            return {absolute(key) if ".py:" in str(key) else key: absolute(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(absolute, value))
        if not isinstance(value, str):
            return value
        path, colon, name = (value, "", "") if os.path.exists(value) else value.partition(":")
        is_path = (os.sep in path or Path(path).suffix) and os.path.exists(path)
        return f"{os.path.abspath(path)}{colon}{name}" if is_path else value

    model = options.model and resolve_model(options.model)
    if model and Path(model).exists():
        model = os.path.abspath(model)
    target, kwargs, data = absolute(options.target), absolute(options.env_kwargs), absolute(options.data)
    return replace(options, target=target, env_kwargs=kwargs, data=data, model=model)


def run_elsewhere(
    options: ConformanceOptions,
    cases: list[EpisodeCase],
    before: Sequence[EpisodeCase],
    answer: str,
    *,
    shifts_clock: bool,
) -> None:
    """Run the episodes of the cases, after those of `before`, and write what they show to the file `answer`."""
    clock: AbstractContextManager[dict[tuple[str, int], None]] = shifted_clock() if shifts_clock else nullcontext({})
    with _recorded_reads() as reads, shortened_sleeps(lambda seconds: True), clock as clock_reads:
        context = ConformanceContext(options, CallWatch(lambda line: None))
        context.cases = cases  # to compute them would play episodes before the first
        episodes, outage = [], None
        try:
            context.require_steps()
            context.run(context.survivors(before, context.episode))
            episodes = _facts(context)
        except InfraError as error:
            outage = str(error)
    part = Path(f"{answer}.part")
    part.write_bytes(pickle.dumps((episodes, reads, tuple(clock_reads), outage)))
    part.rename(answer)
    context.close()


def _facts(context: ConformanceContext) -> list[dict[str, Any]]:
    """Return the facts of each case's episode, and then the rows that this process reads."""
    episodes = [facts_of(trajectory) for trajectory in context.separate_episodes]
    return [*episodes, {"prompts": [jsonable(task.prompt) for task in context.tasks], "error": None}]


@contextmanager
def _recorded_reads() -> Iterator[Reads]:
    """Return the environment variables that are read within the block."""
    reads: Reads = {}
    environ: Any = type(os.environ)
    original = environ.__getitem__

    def read(self: Any, name: str) -> str:
        frame = sys._getframe(1)
        while frame.f_code.co_filename in _LIBRARY and frame.f_back is not None:
            frame = frame.f_back
        reads.setdefault((str(name), frame.f_code.co_filename), frame.f_lineno)
        return original(self, name)  # type: ignore[no-any-return]

    environ.__getitem__ = read
    try:
        yield reads
    finally:
        environ.__getitem__ = original


# --- isolation --------------------------------------------------------------------------------------------------------

NUM_TOGETHER = 32
_HOLDS_S = 6.0
"""Time after which episodes no longer wait for others: more than sqlite3 waits for a lock."""
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
_MAY_STAY = "Data that is the same for all of them may stay there with `cache` in its name."
_NEW = "An action that no other episode has, 7301."
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, Counter, defaultdict, OrderedDict, MappingProxyType)
_ATOMS = (int, float, str, bytes, bool, type(None), bytearray)
_MAX_DEPTH = 8


def isolation(context: ConformanceContext) -> list[Problem]:
    """Each of 32 simultaneous episodes is the same as alone, and changes nothing that all share when played again."""
    context.require_steps()
    cls = context.agent_cls
    before = _class_state(cls), _module_state(cls)
    records = context.separate_episodes
    filled = shared_state(cls)  # after one episode of each case, so that what is loaded once is there
    with record_events(PROCESS_EVENTS, own_files(cls)) as events:
        together = context.run(_together(context))
    differs = None  # the method and the first fact in which an episode differs from the one run alone
    is_of_service = False
    for index, trajectory in together:
        found = difference(records[index], trajectory, ("alone", f"among {NUM_TOGETHER}"))
        if found is not None:
            differs = culprit(found, trajectory), f"{found} (the policy {context.cases[index].policy!r})"
            is_of_service = bool(context.service_errors & {records[index].error, trajectory.error})
            break
    problems = [*_of_class(cls, before[0], f"; {differs[1]}" if differs else "")]
    shared = [*_of_process(cls, events), *_of_shared_state(cls, filled)]
    if differs and not problems:
        if files := context.run(_of_files(context)):
            return files  # the cause
        alone = (context.run(context.run_separately(context.cases)) for _ in range(_NUM_ALONE))
        if any(difference(*pair, ("", "")) for again in alone for pair in zip(records, again, strict=True)):
            if shared:
                return shared  # the cause
            raise NotApplicable("episodes also differ when run alone; fix `determinism` first")
        meanwhile = [name for name, value in _module_state(cls).items() if before[1].get(name, value) != value]
        hint = f" Check {', '.join(meanwhile)} of the module, which changed meanwhile." if meanwhile else ""
        expected = f"the same episode alone and among {NUM_TOGETHER}"
        fix = (
            "Keep the state of an episode on `self`, set in __init__ or reset, or open a session per episode, where a "
            f"service keeps it; hold no lock between turns, such as that of a shared database.{hint}"
        )
        problems.append(problem_at(cls, differs[0], expected, differs[1], FAILED_SERVICE if is_of_service else fix))
    return problems or shared or context.run(_of_files(context)) or context.run(_of_new_actions(context))


def _of_class(cls: type[Any], before: Mapping[str, str], effect: str) -> Iterator[Problem]:
    """Return the problem of each class attribute that episodes change; `effect` says which episode differs."""
    for name, value in _class_state(cls).items():
        if before.get(name, value) == value or (not effect and isinstance(getattr(cls, name, None), _REPLACED)):
            continue
        file, line = attribute_at(cls, name)
        expected, got = "a class attribute that episodes do not change", "another value after episodes than before"
        fix = f"Set it in __init__ (`self.{name} = …`): all episodes of a process share class attributes. {_MAY_STAY}"
        yield Problem(relative_path(file), line, f"{cls.__name__}.{name}", expected, got + effect, fix)


async def _of_new_actions(context: ConformanceContext) -> list[Problem]:
    """Return the notes of what is filled once for each action or argument: only one that is new changes it.

    They are notes, since a table of pure functions does no harm.
    """
    cls = context.agent_cls
    before, filled = _class_state(cls), shared_state(cls)
    calls = calls_with_texts(context.tools, lambda tool: _NEW)
    for case in [case for case in context.cases if case.policy == "silent"]:
        for said in ([_NEW], [*calls.values(), _NEW]):
            await context.episode(replace(case, say=replace(case.say, policy=said), num_turns=len(said)))
    found = unique([*_of_class(cls, before, ""), *_of_shared_state(cls, filled)])
    return [replace(each, got=f"{each.got} by a new action", is_note=True) for each in found]


def _of_process(cls: type[Any], events: Sequence[Event]) -> Iterator[Problem]:
    """Return the problem of code that changes the working directory, or a variable to more than one value."""
    own = [event for event in events if event.line]
    values = {event.subject: {each.description for each in own if each.subject == event.subject} for event in own}
    for event in own:
        if event.description.startswith("changes the working") or len(values[event.subject]) > 1:
            expected, got = "a process that episodes do not change", f"code that {event.description}"
            fix = "All episodes of a process share it: pass a folder or a value as an argument instead."
            yield problem_at(cls, "step", expected, got, fix, line=event.line, file=event.file)
            return


def _of_shared_state(cls: type[Any], before: Mapping[str, str]) -> Iterator[Problem]:
    """Return the problem of each variable that the same episodes change once more."""
    for name, text in shared_state(cls).items():
        if before.get(name, text) != text:
            at = next((i for i, (a, b) in enumerate(zip(before[name], text, strict=False)) if a != b), 0)
            was, now = before[name][max(0, at - 20) : at + 40], text[max(0, at - 20) : at + 40]
            expected, got = f"`{name}` of the module unchanged by episodes", f"{was!r} changed to {now!r}"
            fix = "All episodes of a process share it: keep the state of an episode on `self`, and copy nested values "
            yield problem_at(cls, "step", expected, got, f"{fix}with copy.deepcopy. {_MAY_STAY}")


async def _of_files(context: ConformanceContext) -> list[Problem]:
    """Return the problem of a file that episodes of different seeds write, at any time of the check."""
    cls, places = context.agent_cls, list[dict[str, tuple[str, int]]]()
    for other in (1, 2):
        with record_events(FILE_EVENTS, own_files(cls)) as events:
            for case in context.cases:
                await context.episode(replace(case, seed=case.seed + _OTHER_SEED * other))
        places.append({path: (file, line) for path, (file, line, _) in written_files(events).items()})
    for path, (file, line) in places[0].items():
        if path in places[1] and len(context.writes[path]) > 1:
            fix = (
                "Write to a folder of the episode (tempfile.mkdtemp in `reset`, removed in `close`). Data that is the "
            )
            fix += "same for all of them may stay there with `cache` in the file's name."
            expected, got = "files that only one episode writes", f"{path!r}, which episodes of all seeds write"
            return [problem_at(cls, "step", expected, got, fix, line=line, file=file)]
    return []


async def _together(context: ConformanceContext) -> list[tuple[int, Trajectory]]:
    """Run the episodes at once: one half until before the last actions, then the other half, and then the last actions.

    What an episode holds between its turns, such as the lock of a database, is so held while others act.
    """
    numbered = list(islice(cycle(enumerate(context.cases)), NUM_TOGETHER))
    until, half = asyncio.get_running_loop().time() + _HOLDS_S, NUM_TOGETHER // 2
    halves = {True: set(range(half)), False: set(range(half, NUM_TOGETHER))}
    over = {is_first: asyncio.Event() for is_first in halves}

    def leave(number: int) -> None:
        halves[number < half].discard(number)
        if not halves[number < half]:
            over[number < half].set()

    async def one(index: int, case: EpisodeCase, number: int) -> tuple[int, Trajectory]:
        is_first = number < half
        waits_at = len(context.separate_episodes[index].turns) - 1 if is_first else 0

        async def say(request: Request) -> str:
            if request.turn_index == waits_at:
                if is_first:
                    leave(number)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await over[not is_first].wait()
            return await yielded(case, request)

        for _ in range(number % 7):
            await asyncio.sleep(0)
        try:
            return index, await context.episode(case, engine=ScriptedEngine(say, context.tokenizer))
        finally:
            leave(number)

    return await asyncio.gather(*(one(index, case, number) for number, (index, case) in enumerate(numbered)))


def _class_state(cls: type[Any]) -> dict[str, str]:
    """Return the values of builtin types in the bodies of the class and its bases, as text."""
    return {name: text for base in reversed(own_classes(cls)) for name, text in _plain(vars(base)).items()}


def _module_state(cls: type[Any]) -> dict[str, str]:
    module = sys.modules.get(own_classes(cls)[0].__module__) if own_classes(cls) else None
    return _plain(vars(module)) if module is not None else {}


def _plain(names: Any) -> dict[str, str]:
    """Return the values of builtin types among these names, as text; changes in other types cannot be judged."""
    own = {name: value for name, value in dict(names).items() if not name.startswith("__")}
    return {name: repr(value) for name, value in own.items() if type(value) in _PLAIN and not _on_purpose(name)}


def shared_state(cls: type[Any]) -> dict[str, str]:
    """Return the contents of what episodes of a class share, as text by name, in the modules that define them.

    Only what can be changed in place is there, and not what has a name of `SHARED_ON_PURPOSE`.
    """
    modules = modules_of(cls)
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
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    values = {f"the default of `{p.name}`": (p.name, p.default) for p in parameters if p.default is not p.empty}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            values[f"the variable `{name}` around it"] = (name, cell.cell_contents)
    return {
        f"{label}, {what}": _text(value, names, 0, set())
        for what, (name, value) in values.items()
        if not isinstance(value, _ATOMS) and not _on_purpose(name)
    }


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
        with suppress(sqlite3.Error):  # closed, or of another thread
            return f"{value.total_changes} changes"
    if kind.__module__ in names and isinstance(getattr(value, "__dict__", None), dict):
        return _items(vars(value), names, depth, seen)
    return ""


def _items(value: Mapping[Any, Any], names: set[str], depth: int, seen: set[int]) -> str:
    kept = [(key, each) for key, each in list(value.items()) if not (isinstance(key, str) and _on_purpose(key))]
    return f"{{{', '.join(f'{key!r}: {_text(each, names, depth + 1, seen)}' for key, each in kept)}}}"
