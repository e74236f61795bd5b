"""The worker process that grades: `python -m agentenv.rewards.workers.main`, started by `pool.py`.

It reads length-prefixed JSON from standard input and answers on standard output, one request at a time. It works in its
main thread, where SIGPROF interrupts even big-integer arithmetic, which would block a thread. The limit counts CPU time
(user and system), not waiting for a processor. The process ends with its parent: at end of input, and on Linux by the
parent-death signal.

A handler is a function `handle(request) -> dict`, both plain JSON, which the request names as its task: `module:name`
or `FILE.py:name`. Its module is imported at the first request for it, and its `prepare(request)` is called, if there is
one; neither counts as CPU time of the request.
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
from typing import Any, BinaryIO

from agentenv.errors import ContractError, DataError
from agentenv.rewards.loading import load_function

_RETIRE_AFTER_GROWTH_BYTES = 1 << 29
_MAX_REPLY_BYTES = 8 << 20

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class DeadlineReached(BaseException):
    """A request reached its limit, which the message names. Not an Exception: math-verify and sympy swallow those."""


def serve() -> None:
    """Serve requests until the input ends."""
    if sys.platform == "linux":  # end with the parent
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if len(sys.argv) > 1 and os.getppid() != int(sys.argv[1]):
        sys.exit(0)  # the parent ended before the signal was set
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    _write(replies, {"ready": True, "cpu_s": time.process_time()})
    os.dup2(null, 2)
    loaded: dict[str, Handler] = {}
    usual_bytes = 0
    while len(header := requests.read(4)) == 4:
        message = json.loads(requests.read(*struct.unpack(">I", header)))
        started_s = time.process_time()
        request, limit_s = message["request"], message["cpu_limit_s"]
        if message["verb"] == "load":
            # Import the handler and prepare its module; report what they raise.
            task, reply = request["task"], {"status": "ok", "result": {}}
            sys.path += [path for path in request["path"] if path not in sys.path]
            try:
                handler = loaded[task] = load_function(task)
                if prepare := getattr(sys.modules[handler.__module__], "prepare", None):
                    prepare(request)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the pool reports it to the caller
                detail = f"cannot load {task}: {type(error).__name__}: {error}"[:500]
                reply = {"status": "failed", "detail": detail}
            usual_bytes, interrupted = _resident_bytes(), False
        else:
            reply = _answer(loaded[request["task"]], request, limit_s, message["memory_limit_bytes"])
            interrupted = reply["status"] == "timeout" or time.process_time() - started_s >= limit_s
        retire = interrupted or _resident_bytes() > usual_bytes + _RETIRE_AFTER_GROWTH_BYTES
        _write(replies, {**reply, "id": message["id"], "cpu_s": time.process_time(), "retire": retire})


def _resident_bytes() -> int:
    """Return resident memory. On Linux not `ru_maxrss`, which starts with that of the parent process."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _write(replies: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    replies.write(struct.pack(">I", len(body)) + body)
    replies.flush()


def _answer(handler: Handler, request: dict[str, Any], cpu_s: float, memory_bytes: int | None) -> dict[str, Any]:
    """Return the handler's result, or how it failed; `timeout` if it exceeds its CPU time or memory."""
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
    except ContractError as error:
        return {"status": "contract", "detail": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it must reach the caller as a failed grader
        return {"status": "failed", "detail": f"the grader failed: {type(error).__name__}: {error}"[:500]}


@contextlib.contextmanager
def _limited_memory(limit_bytes: int | None) -> Iterator[None]:
    """Limit the address space inside; macOS has no such limit."""
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
    from agentenv.rewards.workers.main import serve as _serve

    _serve()  # of the module that handlers import, so that they catch the very same DeadlineReached
