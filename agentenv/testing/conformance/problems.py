"""Problem: one breach of the contract, with its place in the author's code and the fix."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentenv._util.brief import brief
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import EpisodeError
from agentenv.episode.failures import FAILED_SERVICE, may_be_a_service, missing_key
from agentenv.errors import ContractError
from agentenv.testing.shifted_clock import own_classes

HANDLE_ACTIONS = "Handle every action a policy may sample: empty, cut off, or in any language."
_OF_ARGUMENTS = re.compile(r"keyword argument|positional argument|missing \d+ required|multiple values for argument")
"""Messages of a TypeError that does not depend on the action: the call itself is wrong."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One breach of the contract."""

    file: str
    line: int
    where: str
    """Class.method"""
    expected: str
    got: str
    fix: str
    property: str = ""
    """Name of the broken property, as `agentenv check` lists it."""
    is_note: bool = False
    """True if it is advice, and no breach."""

    def __str__(self) -> str:
        """Return one line."""
        got = self.got.removesuffix(".")
        return f"{self.file}:{self.line}: {self.where}: expected {self.expected}, got {got}. {self.fix}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, without the property if it is empty."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("property", "is_note")}


def read_message(message: str, where: str) -> tuple[str, str, str]:
    """Split an error message of agentenv into what it expected, what it got, and the fix."""
    subject, _, rest = message.removeprefix(f"{where}: ").partition("expected ")
    expected, _, more = rest.partition(", got ")
    got, dot, fix = more.rpartition(". ")
    if not dot or not fix[:1].isupper():  # the message says nothing of what to do
        got, fix = more, ""
    return subject + expected, got.removesuffix("."), fix


def exception_problem(cls: type[AgentInstance], method: str, error: BaseException) -> Problem:
    """Return the problem of an exception, at the line of the class's own file that raised it or called the raiser."""
    file, line = place_of_method(cls, method)
    trace = (error.__cause__ or error).__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    where, got = f"{cls.__name__}.{method}", f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        got = repr(error)
    if isinstance(error, ContractError) and ", got " in got:
        return Problem(relative_path(file), line, where, *read_message(str(error), where))
    of_actions = method == "step" and not (isinstance(error, TypeError) and _OF_ARGUMENTS.search(str(error)))
    fix = HANDLE_ACTIONS if of_actions else "Fix it."
    if isinstance(error, FrozenInstanceError):
        fix = "It is frozen: return a copy that `dataclasses.replace` has changed."
    if may_be_a_service(error):
        fix = f"{FAILED_SERVICE} {HANDLE_ACTIONS}" if of_actions else FAILED_SERVICE
        fix = "Handle it in `close`: the episode is over, and does not run again." if method == "close" else fix
    return Problem(relative_path(file), line, where, "no exception", got, missing_key(error) or fix)


def record_problem(
    cls: type[AgentInstance], error: EpisodeError, expected: str = "an episode without an error", fix: str = "Fix it."
) -> Problem:
    """Return the problem of the error that an episode recorded, at the line that raised it if that is known."""
    method = {"create": "__init__", "prompt": "reset"}.get(error.where, error.where)
    where = f"{cls.__name__}.{method}"
    if error.message.startswith(f"{where}: ") and ", got " in error.message:
        return problem_at(cls, method, *read_message(error.message, where))
    problem = problem_at(cls, method, expected, f"{error.type}: {error.message}", fix)
    path, _, line = error.place.rpartition(":")
    return replace(problem, file=relative_path(path), line=int(line)) if path else problem


def info_problems(cls: type[AgentInstance], method: str, info: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of values in `info` that are neither text nor finite numbers."""
    bad = {
        key: fact
        for key, fact in info.items()
        if not isinstance(fact, str) and not (hasattr(fact, "__float__") and math.isfinite(float(fact)))
    }
    expected = "finite numbers or text in info"
    return [problem_at(cls, method, expected, f"{bad!r}", "Convert or omit them.")] if bad else []


def problem_at(
    cls: type[AgentInstance], method: str, expected: str, got: str, fix: str, *, line: int | None = None, file: str = ""
) -> Problem:
    """Return a problem of a method, at a line of its or another file if that is known, or else at its first."""
    own, first = place_of_method(cls, method)
    return Problem(relative_path(file or own), line or first, f"{cls.__name__}.{method}", expected, got, fix)


def after_action(action: str | None) -> str:
    """Return " after the action …", with the action in brief; empty without one."""
    return "" if action is None else f" after the action {brief(action)}"


def place_of_method(cls: type[AgentInstance], method: str) -> tuple[str, int]:
    """Return file and line of a method, or of the class if it inherits the method from agentenv or from C code."""
    function = inspect.unwrap(getattr(cls, method, cls))
    code = getattr(function, "__code__", None)
    if code is not None and getattr(AgentInstance, method, None) is not function:
        return code.co_filename, code.co_firstlineno
    theirs = [base for base in cls.__mro__ if base is not object and not base.__module__.startswith("agentenv.")]
    try:
        own = next((base for base in theirs if "step" in vars(base)), theirs[0])
        return inspect.getfile(own), inspect.getsourcelines(own)[1]
    except (IndexError, TypeError, OSError):
        return "?", 0


def own_files(cls: type[Any]) -> set[str]:
    """Return the files of a class and its bases, except for those of agentenv and of Python."""
    modules = (sys.modules.get(each.__module__) for each in own_classes(cls))
    return {place_of_method(cls, "step")[0], *(file for each in modules if (file := getattr(each, "__file__", None)))}


def source_of(cls: type[Any]) -> str:
    """Return the source code of a class; empty if it is not available."""
    try:
        return inspect.getsource(cls)
    except (TypeError, OSError):
        return ""


def relative_path(file: str) -> str:
    """Return a path relative to the working folder, if it is inside."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def unique(problems: Iterable[Problem]) -> list[Problem]:
    """Return each problem once, in the order of the lines."""
    found: dict[tuple[str, int, str], Problem] = {}
    for problem in problems:
        found.setdefault((problem.where, problem.line, problem.expected), problem)
    return sorted(found.values(), key=lambda p: (p.file, p.line))


def attribute_at(cls: type[Any], name: str) -> tuple[str, int]:
    """Return file and line where the class or a base sets an attribute in its body, or else those of the class."""
    for base in cls.__mro__:
        if name not in vars(base):
            continue
        try:
            lines, first = inspect.getsourcelines(base)
            file = inspect.getfile(base)
        except (TypeError, OSError):
            continue
        own = re.compile(rf"^\s+((async\s+)?def\s+{re.escape(name)}\b|{re.escape(name)}\s*(:[^=]*)?=)")
        return file, next((first + i for i, line in enumerate(lines) if own.match(line)), first)
    return place_of_method(cls, "step")
