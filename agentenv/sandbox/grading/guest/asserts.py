"""Runs tests against functions of a solution in another sandbox. Runs inside the sandbox; standard library only.

The source of this file, after that of `codec.py` and `serve.py`, is the program of the tests' sandbox. A candidate here
is a proxy: its call is a line to the parent, which calls the solution's sandbox. Only plain values come back, so no
object of the solution can override `==`, be traced or be found in this interpreter.
"""

import builtins
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from agentenv.sandbox.grading.codec import CodecError, decode, dump_line, encode
from agentenv.sandbox.grading.guest.serve import CHANNEL, Lines

_MAX_DETAIL = 2000
NO_CALL = "it passed without a call of the solution, so it tests nothing"


class CandidateError(Exception):
    """An exception of a class that cannot be transferred: one of the solution, or one that ends a loop of the tests."""


class Broken(BaseException):
    """A call without an answer; not an Exception, so that no test takes it for one of the solution."""


class Candidates:
    """The proxies of the solution's functions, and the state of their calls."""

    def __init__(self, channel: Lines, answers: Iterator[dict[str, Any]], *, in_place: bool) -> None:
        self.broken = ""
        self._in_place = in_place
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
            request = {"name": name, "args": encode(args), "kwargs": encode(kwargs), "in_place": self._in_place}
            self._channel.send(dump_line({"id": self.calls, **request}))
            answer: dict[str, Any] = next(self._answers, {"gone": "the call was never answered"})
            value = decode(answer["value"]) if "value" in answer else None
            after = decode(answer["args"]) if self._in_place and "args" in answer else args
        except CodecError as error:
            self.broken = str(error)
            raise Broken(self.broken) from error
        if "gone" in answer:
            self.broken = str(answer["gone"])
            raise Broken(self.broken)
        if "error" in answer:
            raise as_raised(answer["error"])
        for before, now in zip(args, after, strict=False):
            change(before, now)
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


def change(before: Any, now: Any) -> None:
    """Change an argument in place to the content that the solution gave it."""
    if isinstance(before, (list, bytearray)):
        before[:] = now
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(now)


def run_test(source: str, names: list[str], *, prelude: str, candidates: Candidates) -> tuple[str, str]:
    """Run a test and return its verdict and where it failed."""
    proxies = {name: candidates.proxy(name) for name in names}
    calls = candidates.calls
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(prelude, "prelude.py", "exec", dont_inherit=True), namespace)
        namespace |= {"candidate": proxies[names[0]], **proxies}  # a prelude replaces no function of the solution
        exec(compile(source, "test.py", "exec", dont_inherit=True), namespace)
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
    return ("passed", "") if candidates.calls > calls else ("missing", NO_CALL)


def examine(*, _exit: Callable[[int], Any] = os._exit) -> None:
    """Run all tests of the parent's request and send their verdicts."""
    channel = Lines(CHANNEL)
    messages = iter(channel)
    header = next(messages)
    sys.modules.pop("solution", None)
    candidates = Candidates(channel, messages, in_place=header["in_place"])
    for index, source in enumerate(header["tests"]):
        channel.send(dump_line({"begin": index}))
        verdict, detail = run_test(source, header["names"], prelude=header["prelude"], candidates=candidates)
        channel.send(dump_line({"test": index, "verdict": verdict, "detail": detail}))
        if candidates.broken or (header["stop"] and verdict != "passed"):
            break
    channel.send(dump_line({"end": True}))
    _exit(0)
