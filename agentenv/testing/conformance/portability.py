"""The property `portability`: an episode is the same in another process, which runs elsewhere with other settings."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentenv.errors import InfraError
from agentenv.testing.conformance.call_watch import CallWatch
from agentenv.testing.conformance.cases import Avoided, EpisodeCase
from agentenv.testing.conformance.context import (
    IMPORT_LIMITS,
    ConformanceContext,
    ConformanceOptions,
    NotApplicable,
)
from agentenv.testing.conformance.determinism import determinism
from agentenv.testing.conformance.problems import Problem, problem_at, relative_path
from agentenv.testing.conformance.records import culprit, first_difference, own_classes
from agentenv.testing.conformance.sleeps import shortened_sleeps
from agentenv.testing.diffs import facts_of
from agentenv.testing.shifted_clock import shifted_clock

_CODE = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    from agentenv.testing.conformance.portability import run_elsewhere
    run_elsewhere(*pickle.load(file), sys.argv[2], shifts_clock=sys.argv[3] == "shifted")
"""
_SAME = "the same episode"
_FIXES = {
    "at another time": "Take the time from the row or from `states['seed']`; measure durations with time.monotonic().",
    "in another time zone": "Name the zone: `datetime.fromtimestamp(seconds, UTC)`.",
    "with another PYTHONHASHSEED": "Sort a set before its order matters, and use zlib.crc32 or hashlib, not hash().",
    "in another working directory": "Build paths from Path(__file__).parent, or take them as arguments.",
    "in another process": "Do not use process ids, ids of objects, or what earlier episodes left in the process.",
}
_HASH_SEEDS = ("1", "2", "3")
"""A small set may have the same order with two seeds."""
_OTHER_ZONE = {"TZ": "XXX-13:45"}
_LIBRARY = ("<frozen os>", "<frozen _collections_abc>", os.__file__, inspect.getfile(Mapping))
Reads = dict[tuple[str, str], int]
"""Line of the first read of an environment variable, by its name and the file that reads it."""


@dataclass(frozen=True)
class _Elsewhere:
    """What another process reports: the facts of its episodes, or its error."""

    episodes: list[dict[str, Any]]
    reads: Reads
    error: str = ""
    clock_reads: tuple[tuple[str, int], ...] = ()
    """Files and lines that have read the time of day, if it was shifted."""


def portability(context: ConformanceContext) -> list[Problem]:
    """An episode is the same with another hash seed, working directory, time zone, date, and environment variables."""
    context.require_steps()
    here = _Elsewhere([facts_of(each) for each in context.separate_episodes], {})
    with tempfile.TemporaryDirectory() as folder:
        for seed in _HASH_SEEDS:
            there = _run(context, seed, folder, _OTHER_ZONE, shifts_clock=True)
            if there.error or _first(here, there):
                return [_cause(context, here, there, seed, folder)]
        files = {inspect.getfile(cls) for cls in own_classes(context.agent_cls)}
        for (name, file), line in there.reads.items():
            if file not in files or name == "PYTHONHASHSEED":
                continue
            other = None if name in os.environ else "1"
            changed = _run(context, seed, folder, {**_OTHER_ZONE, name: other}, shifts_clock=True)
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
) -> _Elsewhere:
    """Run the episodes of all cases in a new process: with a hash seed, in a folder, with variables, at a time."""
    paths = [os.path.abspath(path) for path in sys.path]
    options = context.options if folder is None else _with_absolute_paths(context.options)
    environ = {**os.environ, **variables, "PYTHONHASHSEED": hash_seed}
    with tempfile.TemporaryDirectory() as files:
        request, answer = Path(files, "request"), Path(files, "answer")
        try:
            found = context.avoided, context.reached
            request.write_bytes(pickle.dumps(paths) + pickle.dumps((options, *found)))
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
        return _Elsewhere(episodes, reads, clock_reads=clock_reads)


def _with_absolute_paths(options: ConformanceOptions) -> ConformanceOptions:
    """Return the options with absolute paths of the existing files that they name."""

    def absolute(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: absolute(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(absolute, value))
        is_path = isinstance(value, str) and (os.sep in value or Path(value).suffix) and Path(value).exists()
        return os.path.abspath(value) if is_path else value

    target = options.target
    if isinstance(target, str):
        path, colon, attribute = target.partition(":")
        target = f"{absolute(path)}{colon}{attribute}"
    return replace(options, target=target, env_kwargs=absolute(options.env_kwargs), data=absolute(options.data))


def run_elsewhere(
    options: ConformanceOptions,
    avoided: Avoided,
    reached: list[EpisodeCase] | None,
    answer: str,
    *,
    shifts_clock: bool,
) -> None:
    """Run the episodes of all cases in this process and write what they show to the file `answer`."""
    clock: AbstractContextManager[dict[tuple[str, int], None]] = shifted_clock() if shifts_clock else nullcontext({})
    with _recorded_reads() as reads, shortened_sleeps(lambda seconds: True), clock as clock_reads:
        context = ConformanceContext(options, CallWatch(lambda line: None))
        context.avoided, context.reached = avoided, reached
        episodes, outage = [], None
        try:
            context.require_steps()
            episodes = [facts_of(trajectory) for trajectory in context.separate_episodes]
        except InfraError as error:
            outage = str(error)
    part = Path(f"{answer}.part")
    part.write_bytes(pickle.dumps((episodes, reads, tuple(clock_reads), outage)))
    part.rename(answer)
    context.close()


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
