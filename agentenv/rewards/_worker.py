"""The process that judges: `python -m agentenv.rewards._worker`, started by `pool.py`.

It reads length-prefixed JSON from standard input and answers on standard output, one request at a time. It works in its
main thread, where SIGPROF interrupts even the big-integer arithmetic that would freeze a thread, after so much CPU time
(user and system) and not after so much waiting for a processor. It ends with its parent: at end of input, and on Linux
by the parent-death signal.

A handler is a function `handle(request) -> dict`, plain JSON both. Its module is imported when the first request for it
comes, and `prepare(request)` called there, if the module has one; neither counts as the request's computing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from agentenv.errors import DataError
from agentenv.rewards._functions import load_function

_HANDLERS = {
    "math": "agentenv.rewards._math_worker:handle",
    "ifeval": "agentenv.rewards.ifeval._worker:handle",
    "regex": "agentenv.rewards.regex:search_in_worker",
    "json_schema": "agentenv.rewards.json_schema:handle",
    "call": "agentenv.rewards._functions:handle",
}
"""Where the handler of a task is; a task that is not here names its own, as `module:name` or `FILE.py:name`."""
_RETIRE_AFTER_GROWTH_BYTES = 1 << 29
_MAX_REPLY_BYTES = 8 << 20

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class DeadlineReached(BaseException):
    """Not an Exception: math-verify and sympy swallow those. Says the limit."""


def main() -> None:
    """Serves requests until the input ends."""
    _end_with_parent()
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    _write(replies, {"ready": True, "cpu_s": time.process_time()})
    os.dup2(null, 2)
    loaded: dict[str, Handler] = {}
    usual_bytes = 0
    while (message := _read(requests)) is not None:
        started_s = time.process_time()
        request, limit_s = message["request"], message["cpu_limit_s"]
        if message["verb"] == "load":
            reply = _load(request, loaded)
            usual_bytes, interrupted = _held_bytes(), False
        else:
            reply = _answer(loaded[request["task"]], request, limit_s, message["memory_limit_bytes"])
            interrupted = reply["status"] == "timeout" or time.process_time() - started_s >= limit_s
        retire = interrupted or _held_bytes() > usual_bytes + _RETIRE_AFTER_GROWTH_BYTES
        _write(replies, {**reply, "id": message["id"], "cpu_s": time.process_time(), "retire": retire})


def _end_with_parent() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if len(sys.argv) > 1 and os.getppid() != int(sys.argv[1]):
        sys.exit(0)  # the parent ended before the signal was set


def _held_bytes() -> int:
    """Resident memory. On Linux not `ru_maxrss`, which a process that is started begins with its parent's."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _read(fd: int) -> dict[str, Any] | None:
    header = _read_exactly(fd, 4)
    body = _read_exactly(fd, struct.unpack(">I", header)[0]) if header else None
    return json.loads(body) if body else None


def _read_exactly(fd: int, size: int) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def _write(fd: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    frame = struct.pack(">I", len(body)) + body
    while frame:
        frame = frame[os.write(fd, frame) :]


def _load(request: dict[str, Any], loaded: dict[str, Handler]) -> dict[str, Any]:
    """Imports the handler, and what else its module wants before the first request; reports what it raises."""
    task = request["task"]
    sys.path += [path for path in request["path"] if path not in sys.path]
    try:
        handler = loaded[task] = load_function(_HANDLERS.get(task, task))
        if prepare := getattr(sys.modules[handler.__module__], "prepare", None):
            prepare(request)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the pool says it to whoever asked
        return {"status": "failed", "detail": f"cannot load {task}: {type(error).__name__}: {error}"[:500]}
    return {"status": "ok", "result": {}}


def _answer(handler: Handler, request: dict[str, Any], cpu_s: float, memory_bytes: int | None) -> dict[str, Any]:
    """The handler's result, or how it failed; `timeout` when it needs more CPU time or memory than it may have."""
    try:
        with _limited_memory(memory_bytes):
            result = _in_time(cpu_s, handler, request)
        if len(json.dumps(result)) > _MAX_REPLY_BYTES:
            return {"status": "failed", "detail": f"the grader's result is longer than {_MAX_REPLY_BYTES} characters"}
        return {"status": "ok", "result": result}
    except DeadlineReached as limit:
        return {"status": "timeout", "detail": f"the check took more than {limit}"}
    except MemoryError:
        limit_gib = (memory_bytes or 0) / (1 << 30)
        return {"status": "timeout", "detail": f"the check took more than {limit_gib:g} GiB of memory"}
    except DataError as error:
        return {"status": "data", "detail": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it must reach the caller as a failed grader
        return {"status": "failed", "detail": f"the grader failed: {type(error).__name__}: {error}"[:500]}


@contextlib.contextmanager
def _limited_memory(limit_bytes: int | None) -> Iterator[None]:
    """With a limit on the address space; macOS has none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes is None or (soft != resource.RLIM_INFINITY and soft <= limit_bytes):
        yield
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _in_time(limit_s: float, handler: Handler, request: dict[str, Any]) -> dict[str, Any]:
    def interrupt(*_: object) -> None:
        """Raise in the middle of a request that takes too long."""
        raise DeadlineReached(f"{limit_s:g} s of CPU time")

    signal.signal(signal.SIGPROF, interrupt)
    try:
        # Repeats, because an exception raised inside a finalizer or a bare except is lost.
        signal.setitimer(signal.ITIMER_PROF, limit_s, 0.25)
        try:
            return handler(request)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except DeadlineReached:
        signal.setitimer(signal.ITIMER_PROF, 0)
        raise


if __name__ == "__main__":
    from agentenv.rewards import _worker

    _worker.main()  # under the name that handlers import, so that they catch the very same DeadlineReached
