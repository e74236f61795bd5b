"""Hostile programs, as data: what each attempts, under which policy, and how an end without an escape may look.

Every program begins with `PREAMBLE`: `attempt(what, deed)` says TRYING before the deed and HELD or ESCAPED after it.
A program that dies before it tried anything has shown nothing, so that is no pass (`escapes_world.judge`); and what the
host can see for itself (files, listeners, processes, secrets) is judged by the host, whatever the program says.
The cases are tests/sandbox/escapes_{files,processes,system,beyond}.py; `ALL` has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Policy, Status

LIMITS = ExecLimits(
    cpu_s=0.3,
    wall_s=6.0,
    memory_mb=96,
    num_processes=12,
    num_threads=12,
    file_mb=8,
    disk_mb=8,
    num_inodes=256,
    fetch_mb=1,
)
"""Small, so that what runs into them does so at once."""

PREAMBLE = r'''
import ctypes, errno, json, os, sys
W = json.loads(@WORLD@)
ARM = os.uname().machine == "aarch64"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_tried = 0

def say(word, detail=""):
    os.write(1, ("\n%s %s %s\n" % (W["nonce"], word, ascii(detail)[:300])).encode())

def call(x86, arm, *args):
    """A system call by number; OSError where it fails."""
    number = arm if ARM else x86
    if number is None:
        raise OSError(errno.ENOSYS, "not on this machine")
    ctypes.set_errno(0)
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    got = _libc.syscall(ctypes.c_long(number), *given)
    if got == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got

def attempt(what, deed, *but):
    """Do it: an OSError, or an error of `but`, is what containment looks like; any other is a bug of this program."""
    global _tried
    _tried += 1
    if _tried <= W["skip"]:
        return None
    say("TRYING", what)
    try:
        got = deed()
    except (OSError, MemoryError, *but) as error:
        say("HELD", (what, type(error).__name__, getattr(error, "errno", None)))
        return None
    say("ESCAPED", (what, got))
    return got

def surface(what, deed, *also):
    """A system call has to be refused, not answered: EINVAL or EFAULT mean that the kernel looked at it."""
    def strict():
        try:
            return deed()
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EOPNOTSUPP, *also):
                raise
            return 'answered with ' + errno.errorcode.get(error.errno, str(error.errno))
    attempt(what, strict)

def read(path, count=4096):
    with open(path, "rb") as file:
        return file.read(count)

def refuse(reason):
    raise OSError(errno.EPERM, reason)
'''


@dataclass(frozen=True, slots=True)
class Case:
    """One attack."""

    name: str
    category: str
    program: str
    policy: Policy = "pure"
    then: str = ""
    """A second program, run after the first has ended: it says ESCAPED if the first left something."""
    needs: frozenset[str] = frozenset()
    """What the host has to put up: "victim" (a process), "net" (listeners)."""
    ends: frozenset[Status] = frozenset()
    """How it may also end in the middle of an attempt; POLICY always may."""
    must_end: frozenset[Status] = frozenset()
    """How it has to end."""
    limits: ExecLimits = LIMITS
    stdin: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    check: Callable[[ExecResult, dict[str, Any]], str] | None = None
    """Looks at the result, with the facts of `World`; says what is wrong, "" when nothing is."""
    excepted: frozenset[Isolation] = frozenset()
    """Where it is known, and documented, that this is not held."""
    bare: Literal["breaches", "held", "unsafe"] = "breaches"
    """What it does as a plain process: breaches, so that the test is seen to be able to fail; held by this kernel's or
    machine's own ways; or unsafe for the machine, and so not tried."""
    census: bool = False
    """Alone, and afterwards no process of it may be there."""


def case(name: str, category: str, program: str, policy: Policy = "pure", **options: Any) -> Case:
    """A case; sets are given as any iterable."""
    for key in ("needs", "ends", "must_end", "excepted"):
        if key in options:
            options[key] = frozenset(options[key])
    return Case(name, category, program, policy, **options)


def source(program: str, facts: dict[str, Any]) -> str:
    """The program with its preamble and the facts of its world filled in."""
    import json

    return PREAMBLE.replace("@WORLD@", repr(json.dumps(facts))) + program


def all_cases() -> list[Case]:
    """Every case, by name unique."""
    from tests.sandbox import escapes_beyond as beyond
    from tests.sandbox import escapes_files as files
    from tests.sandbox import escapes_processes as processes
    from tests.sandbox import escapes_system as system

    cases = [
        *files.FILES,
        *files.SECRETS,
        *files.NETWORK,
        *processes.PROCESSES,
        *system.SYSTEM_CALLS,
        *system.RESOURCES,
    ]
    cases += [*beyond.ARTIFACTS, *beyond.STATE, *beyond.REPORTS, *beyond.SIGNALS, *beyond.CHEATS, *beyond.CONTROLS]
    if len({one.name for one in cases}) != len(cases):
        raise AssertionError("tests/sandbox/escapes: two cases have one name")
    return cases
