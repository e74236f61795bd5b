"""Runs tests against functions of a solution in another sandbox. Runs inside the sandbox; standard library only.

The source of this file, after that of `codec.py` and `serve.py`, is the program of the tests' sandbox. A candidate here
is a proxy: its call is a line to the parent, which calls the solution's sandbox. Only plain values come back, so no
object of the solution can override `==`, be traced or be found in this interpreter.
"""

import ast
import builtins
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from agentenv.sandbox.grading.codec import CodecError, decode, dump_line, encode
from agentenv.sandbox.grading.guest.serve import CHANNEL, Lines

_MAX_DETAIL = 2000
BROAD = {"Exception", "BaseException", "AssertionError"}
NO_CALL = "it passed without a call of the solution, so it tests nothing"


class CandidateError(Exception):
    """An exception of a class that cannot be transferred: one of the solution, or one that ends a loop of the tests."""


class Broken(BaseException):
    """A call without an answer; not an Exception, so that no test takes it for one of the solution."""


class Candidates:
    """The proxies of the solution's functions, and the state of their calls."""

    def __init__(self, channel: Lines, answers: Iterator[dict[str, Any]]) -> None:
        self.broken = ""
        self._channel = channel
        self._answers = answers
        self.calls = 0

    def proxy(self, name: str) -> Callable[..., Any]:
        """Return a proxy of the solution's function of this name."""

        def candidate(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, list(args), kwargs)

        candidate.__name__ = candidate.__qualname__ = name
        return candidate

    def _call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.broken:
            raise Broken(self.broken)
        self.calls += 1
        try:
            request = {"name": name, "args": encode(args), "kwargs": encode(kwargs)}
            self._channel.send(dump_line({"id": self.calls, **request}))
            answer: dict[str, Any] = next(self._answers, {"gone": "the call was never answered"})
            value = decode(answer["value"]) if "value" in answer else None
        except CodecError as error:
            self.broken = str(error)
            raise Broken(self.broken) from error
        if "gone" in answer:
            self.broken = str(answer["gone"])
            raise Broken(self.broken)
        if "error" in answer:
            raise as_raised(answer["error"])
        return value


def as_raised(error: dict[str, Any]) -> Exception:
    """Return the solution's exception as its nearest built-in class, because its own class cannot be transferred.

    StopIteration is not transferred either: in `all(map(candidate, cases))` it would end the tests and pass them.
    """
    kind, message = getattr(builtins, str(error.get("builtin")), None), str(error.get("message"))
    ends_loops = (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_loops):
        try:
            return kind(message)
        except TypeError:
            return CandidateError(f"{error.get('type')}: {message}")
    return CandidateError(f"{error.get('type')}: {message}")


class Evidence:
    """What the asserts of a test have shown, whatever became of their errors.

    One must have held, by more than having nothing to check, unless a handler took an error of the solution for right.
    All that began must have held, unless a handler that names other errors, or judges by itself, caught the error.
    """

    def __init__(self) -> None:
        self._has_asserts = self._has_handled = False
        self._num_held = self._num_open = self._num_empty = 0
        self.names: dict[str, Any] = {
            "_assert_begins": self._begins,
            "_assert_holds": self._holds,
            "_num_open": lambda: self._num_open,
            "_handle": self._handle,
            "all": self._telling(all),
            "any": self._telling(any),
        }

    def problem(self) -> str:
        """Return why a test that raised nothing shows nothing, or an empty text."""
        if self._num_open:
            return "an assert did not hold, and the test caught its error"
        has_shown = self._num_held or self._has_handled or not self._has_asserts
        return "" if has_shown else "its asserts had nothing to check"

    def program(self, source: str, name: str) -> Any:
        """Return the code of a source whose asserts and handlers tell this object."""
        tree = ast.parse(source, name)
        self._has_asserts |= _tell(tree.body)
        return compile(tree, name, "exec", dont_inherit=True)

    def _begins(self) -> int:
        self._num_open += 1
        return self._num_empty

    def _holds(self, num_empty: int, value: Any, sweeps: bool) -> bool:
        if not value:
            return False
        self._num_open -= 1
        self._num_held += not sweeps or self._num_empty == num_empty
        return True

    def _handle(self, num_open: int | None = None) -> None:
        self._has_handled = True
        self._num_open = self._num_open if num_open is None else num_open

    def _telling(self, function: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Return `all` or `any` with a count of its calls that had nothing to check."""

        def sweep(items: Any) -> bool:
            rest = iter(items)
            for first in rest:
                return function(itertools.chain((first,), rest))
            self._num_empty += 1
            return function(())

        return sweep


def _tell(statements: list[Any]) -> bool:
    """Make asserts and handlers in statements tell an `Evidence`; return True if there are asserts.

    Expressions have no asserts in them: those of tests may be megabytes of values.
    """
    has_asserts = False
    for node in statements:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            has_asserts |= isinstance(inner, list) and _tell(inner)
        if isinstance(node, ast.Assert):
            has_asserts = True
            begins = _call(node, "_assert_begins")
            node.test = _call(node, "_assert_holds", begins, node.test, _at(node, ast.Constant(_sweeps(node.test))))
        elif isinstance(node, ast.Try):
            name = f"_num_open_{node.lineno}_{node.col_offset}"
            for handler in node.handlers:
                arguments = [_at(node, ast.Name(name, ast.Load()))] if judges(handler) else []
                handler.body.insert(0, _at(handler, ast.Expr(_call(handler, "_handle", *arguments))))
            stored = ast.Assign([_at(node, ast.Name(name, ast.Store()))], _call(node, "_num_open"))
            node.body.insert(0, _at(node, stored))
    return has_asserts


def _at(node: Any, made: Any) -> Any:
    return ast.copy_location(made, node)


def _call(node: Any, name: str, *arguments: ast.expr) -> Any:
    return _at(node, ast.Call(_at(node, ast.Name(name, ast.Load())), list(arguments), []))


def judges(handler: ast.ExceptHandler) -> bool:
    """Return False for a handler that also takes errors of asserts for right."""
    caught = ast.walk(handler.type) if handler.type else [ast.Name("Exception")]
    if not any(isinstance(each, ast.Name) and each.id in BROAD for each in caught):
        return True
    for node in [each for statement in handler.body for each in ast.walk(statement)]:
        match node:
            case ast.Assert() | ast.Raise():
                return True
            case ast.Return(value=ast.Constant(value=value)):
                return value is not None and not value
            case ast.Return(value=ast.expr()):
                return True
    return False


def _sweeps(test: ast.expr) -> bool:
    """Return True for `all(…)`, `not any(…)` and their conjunctions, which hold for nothing."""
    match test:
        case ast.Call(func=ast.Name(id="all")) | ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Name(id="any"))):
            return True
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(_sweeps, values))
    return False


def run_test(source: str, names: list[str], *, prelude: str, candidates: Candidates) -> tuple[str, str]:
    """Run a test and return its verdict and where it failed."""
    proxies = {name: candidates.proxy(name) for name in names}
    calls = candidates.calls
    evidence = Evidence()
    namespace: dict[str, Any] = {"__name__": "tests", **evidence.names}
    try:
        exec(evidence.program(prelude, "prelude.py"), namespace)
        namespace |= {"candidate": proxies[names[0]], **proxies}  # a prelude replaces no function of the solution
        exec(evidence.program(source, "test.py"), namespace)
        for name in [name for name in namespace if name.startswith("test_")]:
            namespace[name]()
    except Broken as error:
        return "error", str(error)
    except BaseException as error:  # noqa: BLE001
        lines = source.splitlines()
        numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "test.py"]
        where = [lines[number - 1].strip() for number in numbers if number and number <= len(lines) > 1]
        text = "\n".join([*where, "".join(traceback.format_exception_only(error)).strip()])
        return "failed" if isinstance(error, AssertionError) else "error", text[:_MAX_DETAIL]
    if candidates.broken:
        return "error", candidates.broken
    if candidates.calls == calls:
        return "missing", NO_CALL
    return ("failed", problem) if (problem := evidence.problem()) else ("passed", "")


def examine(*, _exit: Callable[[int], Any] = os._exit) -> None:
    """Run all tests of the parent's request and send their verdicts."""
    channel = Lines(CHANNEL)
    messages = iter(channel)
    header = next(messages)
    sys.modules.pop("solution", None)
    candidates = Candidates(channel, messages)
    for index, source in enumerate(header["tests"]):
        channel.send(dump_line({"begin": index}))
        verdict, detail = run_test(source, header["names"], prelude=header["prelude"], candidates=candidates)
        channel.send(dump_line({"test": index, "verdict": verdict, "detail": detail}))
        if candidates.broken or (header["stop"] and verdict != "passed"):
            break
    channel.send(dump_line({"end": True}))
    _exit(0)
