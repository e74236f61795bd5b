"""Loads a solution and answers calls of its functions, one JSON line each. Runs inside the sandbox.

The source of this file, after that of `codec.py`, is the program of the sandbox. It has no expected values, so a
solution that tampers with this interpreter can change only its own answers. Standard library only.
"""

import builtins
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentenv.sandbox.grading.codec import CodecError, decode, dump_line, encode, parse_line

SOLUTION = "solution.py"
CHANNEL = 3
_MAX_TEXT = 1000
_NO_THREAD = "RuntimeError: can't start new thread"
_WATCHED = {
    "ctypes.dlopen": "ctypes",
    "gc.get_objects": "gc_scan",
    "gc.get_referents": "gc_scan",
    "gc.get_referrers": "gc_scan",
    "os.exec": "process",
    "os.fork": "process",
    "os.kill": "process",
    "os.system": "process",
    "socket.__new__": "network",
    "socket.getaddrinfo": "network",
    "subprocess.Popen": "process",
    "sys._getframe": "frame_walk",
    "sys.setprofile": "trace",
    "sys.settrace": "trace",
}
"""Tamper signals by audit event, for actions that a solution does not need."""
_COMMON_IN_LIBRARIES = ("frame_walk", "trace")
"""Signals of actions that libraries also perform; they count only if the solution performs them directly."""


class Lines:
    """A channel of lines: a file descriptor to read from, and CHANNEL to write to."""

    def __init__(self, source: int) -> None:
        self.source = source

    def __iter__(self) -> Iterator[dict[str, Any]]:
        parts: list[bytes] = []  # of a line that may have megabytes
        while chunk := os.read(self.source, 1 << 16):
            *ends, start = chunk.split(b"\n")
            for end in ends:
                yield parse_line(b"".join([*parts, end]))
                parts.clear()
            parts.append(start)

    def send(self, line: bytes, *, _write: Callable[[int, Any], int] = os.write) -> None:
        """Write a complete line."""
        view = memoryview(line)
        while view:
            view = view[_write(CHANNEL, view) :]


class Watch:
    """An audit hook that notes suspicious actions of the solution, and access to test files."""

    def __init__(self, solution: str, tests: Sequence[str] = ()) -> None:
        self.signals: set[str] = set()
        self._solution = solution
        self._tests = {os.path.abspath(test) for test in tests}
        """Files whose opening it notes."""
        self._busy = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Note one event without raising, because an exception would change the program."""
        if self._busy:
            return
        signal = _WATCHED.get(event)
        if event == "open" and isinstance(args[0], str) and self._tests and os.path.abspath(args[0]) in self._tests:
            signal = "test_file_open"
        if signal is None:
            return
        self._busy = True
        try:
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != self._solution:
                frame = None if signal in _COMMON_IN_LIBRARIES else frame.f_back
            if frame is not None:
                self.signals.add(signal)
        finally:
            self._busy = False


def load(code: str, prelude: str, names: list[str]) -> types.ModuleType:
    """Load the solution as a module, so that its `__main__` part does not run; only it can define these names."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    linecache.cache[SOLUTION] = (len(code), None, code.splitlines(keepends=True), SOLUTION)
    exec(compile(prelude, "prelude.py", "exec", dont_inherit=True), module.__dict__)
    for name in names:  # `from math import *` is not a solution of `gcd`
        module.__dict__.pop(name, None)
    exec(compile(code, SOLUTION, "exec", dont_inherit=True), module.__dict__)
    return module


def find(module: types.ModuleType, name: str) -> Any:
    """Return a function by name, or a method of a new instance: `Solution.solve`, also found as `solve`."""
    first, *rest = name.split(".")
    if not rest and not hasattr(module, first) and hasattr(getattr(module, "Solution", None), first):
        first, rest = "Solution", [first]
    if not hasattr(module, first):
        raise NameError(f"{SOLUTION} defines no {name!r}")
    target = getattr(module, first)
    for attribute in rest:
        target = getattr(target() if isinstance(target, type) else target, attribute)
    return target


def report(error: BaseException) -> dict[str, Any]:
    """Return an exception as text, with its nearest built-in class and the frames of the solution."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    builtin = next((kind for kind in kinds if isinstance(getattr(builtins, kind, None), type)), "Exception")
    try:
        lines = [
            f'  File "{SOLUTION}", line {frame.lineno}, in {frame.name}\n    {frame.line}\n'
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == SOLUTION
        ]
        text = "".join(traceback.format_exception_only(error)).strip()
        message = str(error)
    except BaseException as second:  # noqa: BLE001
        lines, text = [], f"{kinds[0]}, whose text raised {type(second).__name__}"
        message = text
    tell_lack(text)
    frames = "".join([*lines[:2], *lines[2:][-4:]])
    return {
        "type": kinds[0][:100],
        "builtin": builtin,
        "message": message[:_MAX_TEXT],
        "text": f"{frames}{text[-_MAX_TEXT:]}"[-4 * _MAX_TEXT :],
    }


def tell_lack(error: str) -> None:
    """Write to stderr that an error is a lack of threads; as its last line, it makes the sandbox run this again alone.

    Neighbors of the same user may have had them.
    """
    if _NO_THREAD in error:
        os.write(2, f"\n{_NO_THREAD}\n".encode())


def answer(module: types.ModuleType, request: dict[str, Any], *, max_bytes: int, watch: Watch) -> bytes:
    """Run a call and return its answer: the value, or the exception."""
    try:
        args, kwargs = decode(request["args"]), decode(request["kwargs"])
        value = find(module, request["name"])(*args, **kwargs)
        message = {"id": request["id"], "value": encode(value)}
        line = dump_line(message)
        if len(line) > max_bytes:
            raise CodecError(f"a value of {len(line)} bytes as JSON; {max_bytes} may leave the sandbox")
    except BaseException as error:  # noqa: BLE001
        if isinstance(error, SystemExit):
            watch.signals.add("exit_in_call")
        return dump_line({"id": request["id"], "error": report(error)})
    return line


def serve(source: int, *, _exit: Callable[[int], Any] = os._exit) -> None:
    """Answer all calls from `source`. Standard input is read completely before the solution is loaded."""
    channel = Lines(source)
    requests = iter(list(channel)) if source == 0 else iter(channel)
    header, watch = next(requests), Watch(SOLUTION)
    sys.addaudithook(watch)
    channel.send(dump_line({"begin": True}))
    try:
        module = load(header["code"], header["prelude"], header["names"])
    except BaseException as error:  # noqa: BLE001
        if isinstance(error, SystemExit):
            watch.signals.add("exit_at_import")
        channel.send(dump_line({"load_error": report(error)}))
    else:
        channel.send(dump_line({"ready": True}))
        for request in requests:
            if "end" in request:
                break
            channel.send(answer(module, request, max_bytes=header["max_bytes"], watch=watch))
    channel.send(dump_line({"end": True, "signals": sorted(watch.signals)}))
    _exit(0)
