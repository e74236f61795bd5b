"""Problem: one breach of the contract, with the place in the author's own code and what mends it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentenv.agent import AgentInstance
from agentenv.errors import ContractError

_OF_ARGUMENTS = re.compile(r"keyword argument|positional argument|missing \d+ required|multiple values for argument")
"""A call that is written wrong, whatever the action."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One breach of the contract."""

    file: str
    line: int
    where: str
    """Class.method"""
    expected: str
    got: str
    mend: str
    property: str = ""
    """Name of the property that it breaks, as `agentenv check` lists them."""

    def __str__(self) -> str:
        """One line."""
        got = self.got.removesuffix(".")
        return f"{self.file}:{self.line}: {self.where}: expected {self.expected}, got {got}. {self.mend}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; without the property, where it is not known."""
        return {name: value for name, value in asdict(self).items() if value or name != "property"}


def read_message(message: str, where: str) -> tuple[str, str, str]:
    """What a message of ours expected, what it got and how to mend it."""
    subject, _, rest = message.removeprefix(f"{where}: ").partition("expected ")
    facts, _, mend = rest.rpartition(". ")
    expected, _, got = facts.partition(", got ")
    return subject + expected, got, mend


def raised(cls: type[AgentInstance], method: str, error: BaseException) -> Problem:
    """The problem of an exception, in the line of the class's own file that it passed."""
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
        return Problem(short(file), line, where, *read_message(str(error), where))
    of_actions = method == "step" and not (isinstance(error, TypeError) and _OF_ARGUMENTS.search(str(error)))
    mend = "Handle every action a policy may sample: empty, cut, in any language." if of_actions else "Mend it."
    return Problem(short(file), line, where, "no exception", got, mend)


def problem_at(cls: type[AgentInstance], method: str, expected: str, got: str, mend: str) -> Problem:
    """A problem of a method, in its first line."""
    file, line = place_of_method(cls, method)
    return Problem(short(file), line, f"{cls.__name__}.{method}", expected, got, mend)


def place_of_method(cls: type[AgentInstance], method: str) -> tuple[str, int]:
    """File and line of a method; of the class where the method is inherited from us or from C."""
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


def short(file: str) -> str:
    """A path as seen from the working folder."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def unique(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once, in the order of the lines."""
    found: dict[tuple[str, int, str], Problem] = {}
    for problem in problems:
        found.setdefault((problem.where, problem.line, problem.expected), problem)
    return sorted(found.values(), key=lambda p: (p.file, p.line))


def attribute_at(cls: type[Any], name: str) -> tuple[str, int]:
    """File and line where the class, or one that it extends, sets an attribute in its body; else of the class."""
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
