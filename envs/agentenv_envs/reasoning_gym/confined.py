"""A function's result from a child process that has nothing: no network, no files to write, no processes, little time.

The second wall behind `data_only.py`: what got past that list could harm neither this machine nor the next answer's
grade. It is Linux's: seccomp and landlock, as in `agentenv.sandbox`; elsewhere, or where the kernel lacks them, limits
on time, memory and files remain.
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
"""Address space beyond what the worker has."""
_CHANNEL = 3


class TookTooMuch(Exception):
    """The child used up its time, or made a system call that no scorer makes."""


def in_child(function: Callable[[], Any], *, cpu_s: float) -> Any:
    """What the function gives, plain JSON, from a child that was forked for it.

    Raises:
        TookTooMuch: it computed for longer than `cpu_s` (in whole seconds, rounded up), or attacked.
        InfraError: it died otherwise, or said nothing: nobody knows why.
    """
    walls = _walls()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(function, theirs, walls, cpu_s)
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb") as answers:
            said = answers.read(1 << 20)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGXCPU, -signal.SIGSYS):
        raise TookTooMuch(f"it was ended by {signal.Signals(-code).name}")
    if code != 0 or not said:
        raise InfraError(f"confined scorer: expected a result, got its end with exit code {code}. Try again.")
    result, raised = json.loads(said)
    if raised:
        raise InfraError(f"confined scorer: expected a result, got {raised}. Try again.")
    return result


def _be_the_child(function: Callable[[], Any], out: int, walls: tuple[Any, Any], cpu_s: float) -> NoReturn:
    try:
        os.dup2(out, _CHANNEL)
        data = json.dumps(_guarded(function, walls, cpu_s)).encode()
        while data:
            data = data[os.write(_CHANNEL, data) :]
        os._exit(0)
    finally:
        os._exit(1)


def _guarded(function: Callable[[], Any], walls: tuple[Any, Any], cpu_s: float) -> tuple[Any, str]:
    """The function's result, and what it raised."""
    try:
        _limit(cpu_s)
        _confine(*walls)
        os.closerange(_CHANNEL + 1, 1 << 16)
        return function(), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent raises it
        return None, f"{type(error).__name__}: {error}"[:500]


def _limit(cpu_s: float) -> None:
    seconds = math.ceil(cpu_s)
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, mapped + MEMORY_BYTES)
    _lower(resource.RLIMIT_CPU, seconds, seconds + 1)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        _lower(kind, 0)


def _lower(kind: int, limit: int, hard: int | None = None) -> None:
    """Set a limit, or keep one that is lower already: nobody but root may raise it."""
    most = resource.getrlimit(kind)[1]
    wanted = (limit, limit if hard is None else hard)
    resource.setrlimit(kind, wanted if most == resource.RLIM_INFINITY else (min(wanted[0], most), min(wanted[1], most)))


@functools.cache
def _walls() -> tuple[Any, Any]:
    """A filter of system calls and a list of what may be read; None each where the kernel has it not."""
    if sys.platform != "linux":
        return None, None
    from agentenv.sandbox import _landlock, _linux, _seccomp

    readable = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", *sys.path), _landlock.READ)
    rules = calls = None
    with contextlib.suppress(_linux.StepError):
        rules = _landlock.Ruleset(_landlock.abi(), {path: right for path, right in readable.items() if path})
    with contextlib.suppress(_linux.StepError):
        calls = _seccomp.Filter(_seccomp.assemble(processes=False, own_signals=True, own_groups=True))
    return calls, rules


def _confine(calls: Any, rules: Any) -> None:
    if sys.platform != "linux":
        return
    from agentenv.sandbox import _linux

    _linux.prctl(_linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    _linux.prctl(_linux.PR_SET_NO_NEW_PRIVS, 1)
    # A container may refuse either, and the other holds all the same.
    with contextlib.suppress(_linux.StepError):
        if rules is not None:
            rules.enter()
    with contextlib.suppress(_linux.StepError):
        if calls is not None:
            calls.install(os.getpid())
