"""A function's result from a child process without network, writable files or subprocesses, and with little time.

The second defense behind `data_only.py`: code that passes that check can harm neither this machine nor the next
answer's grade. It uses Linux's seccomp and landlock, as `agentenv.sandbox` does; elsewhere, or if the kernel lacks
them, limits on time, memory and files remain.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from agentenv.errors import InfraError

MEMORY_BYTES = 1 << 30
"""Address space beyond what the worker already uses."""
_CHANNEL = 3


class TookTooMuch(Exception):
    """The child used up its time, or made a system call that no scorer makes."""


def in_child(function: Callable[[], Any], *, cpu_s: float) -> Any:
    """Return the function's result, plain JSON, from a forked child.

    Raises:
        TookTooMuch: the child computed for longer than `cpu_s` (in whole seconds, rounded up), or made a forbidden
            call.
        InfraError: the child died otherwise or returned nothing, for an unknown reason.
    """
    walls = _walls()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(function, theirs, walls, cpu_s)
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb") as answers:
            output = answers.read(1 << 20)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGXCPU, -signal.SIGSYS):
        raise TookTooMuch(f"ended by {signal.Signals(-code).name}")
    if code != 0 or not output:
        raise InfraError(f"confined scorer: expected a result, got exit code {code}. Try again.")
    result, raised = json.loads(output)
    if raised:
        raise InfraError(f"confined scorer: expected a result, got {raised}. Try again.")
    return result


def _run_child(function: Callable[[], Any], out: int, walls: tuple[Any, Any], cpu_s: float) -> NoReturn:
    """Send the function's result and the text of its exception."""
    try:
        os.dup2(out, _CHANNEL)
        outcome: tuple[Any, str]
        try:
            _limit(cpu_s)
            _confine(*walls)
            os.closerange(_CHANNEL + 1, 1 << 16)
            outcome = function(), ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent raises it
            outcome = None, f"{type(error).__name__}: {error}"[:500]
        data = json.dumps(outcome).encode()
        while data:
            data = data[os.write(_CHANNEL, data) :]
        os._exit(0)
    finally:
        os._exit(1)


def _limit(cpu_s: float) -> None:
    seconds = math.ceil(cpu_s)
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, mapped + MEMORY_BYTES)
    _lower(resource.RLIMIT_CPU, seconds, seconds + 1)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        _lower(kind, 0)


def _lower(kind: int, limit: int, hard: int | None = None) -> None:
    """Set a limit, or keep a lower one: only root may raise it."""
    most = resource.getrlimit(kind)[1]
    wanted = (limit, limit if hard is None else hard)
    resource.setrlimit(kind, wanted if most == resource.RLIM_INFINITY else (min(wanted[0], most), min(wanted[1], most)))


@functools.cache
def _walls() -> tuple[Any, Any]:
    """Return a filter of system calls and a list of readable paths; each is None if the kernel lacks the feature."""
    if sys.platform != "linux":
        return None, None
    from agentenv.sandbox.guest import landlock, linux, seccomp

    readable = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", *sys.path), landlock.READ)
    rules = calls = None
    with contextlib.suppress(linux.StepError):
        rules = landlock.Ruleset(landlock.abi(), {path: right for path, right in readable.items() if path})
    with contextlib.suppress(linux.StepError):
        calls = seccomp.Filter(seccomp.assemble(processes=False, own_signals=True, on_host=True))
    return calls, rules


def _confine(calls: Any, rules: Any) -> None:
    if sys.platform != "linux":
        return
    from agentenv.sandbox.guest import linux

    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # A container may refuse either; the other still applies.
    with contextlib.suppress(linux.StepError):
        if rules is not None:
            rules.enter()
    with contextlib.suppress(linux.StepError):
        if calls is not None:
            calls.install(os.getpid())
