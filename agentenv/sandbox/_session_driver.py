"""Runs inside the sandbox: executes one turn after the other in one namespace. Framed JSON on descriptor 3.

A frame is its length in 4 bytes, and that much JSON. What comes: code and its limits. What goes: the value of a last
expression, the traceback, and the limit that was hit. All of it is as untrusted as the code that runs beside it.
"""

import ast
import json
import linecache
import os
import resource
import signal
import sys
import time
import traceback
from types import FrameType, TracebackType
from typing import Any

_MAX_VALUE = 8192
_MAX_TRACEBACK = 32768


class TimeLimit(BaseException):
    """Ends a turn; no `except Exception` of the code's keeps it."""


_turn_end = [0.0]
"""CPU time that a turn may go on to."""


def _stop(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGXCPU and time.process_time() < _turn_end[0]:
        return  # the kernel's count runs ahead on a busy machine; it says so again after a second of it
    raise TimeLimit("cpu" if number == signal.SIGXCPU else "wall")


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(3, size - len(data))
        if not part:
            raise SystemExit
        data += part
    return data


def _write(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    rest = memoryview(len(data).to_bytes(4, "little") + data)
    while rest:
        rest = rest[os.write(3, rest) :]


def _arm(limits: dict[str, Any]) -> None:
    used = time.process_time()
    _turn_end[0] = used + limits["cpu_s"]
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(int(used + limits["cpu_s"]) + 1, hard), hard))
    signal.signal(signal.SIGXCPU, _stop)
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, limits["wall_s"])


def _disarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _execute(code: str, name: str, namespace: dict[str, Any]) -> str | None:
    """The value of a last expression, as text; None without one, or when it is None."""
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


class _Turn:
    """Takes whatever the code raises."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {"value": None, "traceback": None, "limit": None, "exit": None}

    def __enter__(self) -> dict[str, Any]:
        return self.answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        _disarm()
        if kind is None or error is None:
            return True
        if isinstance(error, SystemExit):
            self.answer["exit"] = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error, TimeLimit):
            self.answer["limit"] = error.args[0]
        elif isinstance(error, MemoryError):
            self.answer["limit"] = "memory"
        self.answer["traceback"] = _told(traceback.TracebackException(kind, error, trace))[-_MAX_TRACEBACK:]
        return True


def _told(told: traceback.TracebackException) -> str:
    """A traceback from the first frame of a turn on; without ours, which are called from there by a signal."""
    ours = _stop.__code__.co_filename
    first = next((i for i, frame in enumerate(told.stack) if frame.filename.startswith("turn-")), len(told.stack))
    frames = [frame for frame in told.stack[first:] if frame.filename != ours]
    told.stack = traceback.StackSummary.from_list(frames)
    return "".join(told.format() if frames else told.format_exception_only())


def main() -> None:
    """Serve turns until the other side closes."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    number = 0
    while True:
        request = json.loads(_read(int.from_bytes(_read(4), "little")))
        number += 1
        turn = _Turn()
        with turn as answer:
            _arm(request)
            answer["value"] = _execute(request["code"], f"turn-{number}.py", namespace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        _write(turn.answer)


if __name__ == "__main__":
    main()
