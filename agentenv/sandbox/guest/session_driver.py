"""The driver of an interpreter session: executes turns in one namespace. Runs inside the sandbox, as a program.

Requests and answers on descriptor 3 are lines of JSON. A request has code and limits; an answer
has the value of the last expression, the traceback, and the limit that was reached. Answers are as untrusted as the
code, which runs in the same interpreter.
"""

import ast
import json
import linecache
import os
import signal
import sys
import time
import traceback
from types import FrameType
from typing import Any

_MAX_VALUE = 8192
_MAX_TRACEBACK = 32768
_REPEAT_S = 0.1
"""CPU time after which a turn past its limit is interrupted again."""


class TimeLimit(BaseException):
    """The end of a turn by a limit; `except Exception` in the code does not catch it."""


_turn_end = [0.0]
"""CPU time of the process at which the turn must end."""


def _stop(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGPROF and time.process_time() < _turn_end[0]:
        return  # the kernel's count runs ahead on a busy machine; the signal repeats
    raise TimeLimit("cpu" if number == signal.SIGPROF else "wall")


def _execute(code: str, name: str, namespace: dict[str, Any]) -> str | None:
    """Execute a turn and return the `repr` of its last expression; None if there is none or its value is None."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
    if value is None:
        return None
    namespace["_"] = value
    return repr(value)[:_MAX_VALUE]


def _stop_timers() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the part of an answer that tells an exception of the code."""
    answer: dict[str, Any] = {}
    if isinstance(error, SystemExit):
        answer["exit"] = error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, TimeLimit):
        answer["limit"] = error.args[0]
    elif isinstance(error, MemoryError):
        answer["limit"] = "memory"
    # From the first frame of the turn, without the driver's signal handler.
    text = traceback.TracebackException.from_exception(error)
    stack, driver = text.stack, _stop.__code__.co_filename
    first = next((i for i, frame in enumerate(stack) if frame.filename.startswith("turn-")), len(stack))
    frames = [frame for frame in stack[first:] if frame.filename != driver]
    text.stack = traceback.StackSummary.from_list(frames)
    lines = text.format() if frames else text.format_exception_only()
    return {**answer, "traceback": "".join(lines)[-_MAX_TRACEBACK:]}


def main() -> None:
    """Serve turns until the caller closes descriptor 3."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with open(3, "rb", closefd=False) as requests:
        for number, line in enumerate(requests, 1):
            request = json.loads(line)
            answer: dict[str, Any] = {"value": None, "traceback": None, "limit": None, "exit": None}
            try:
                _turn_end[0] = time.process_time() + request["cpu_s"]
                signal.signal(signal.SIGPROF, _stop)
                signal.signal(signal.SIGALRM, _stop)
                signal.setitimer(signal.ITIMER_PROF, request["cpu_s"], _REPEAT_S)
                signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
                answer["value"] = _execute(request["code"], f"turn-{number}.py", namespace)
                _stop_timers()
            except BaseException as error:  # noqa: BLE001 -- the code's, which is told
                _stop_timers()
                answer |= _failure(error)
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError, AttributeError):
                    continue
            rest = memoryview(json.dumps(answer).encode() + b"\n")
            while rest:
                rest = rest[os.write(3, rest) :]


if __name__ == "__main__":
    main()
