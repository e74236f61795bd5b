"""The form of a case: a hostile program, its policy, and how it may end if it is contained.

Every program begins with `PREAMBLE`: `attempt(what, deed)` prints TRYING before the deed and HELD or ESCAPED after it.
A program that dies before its first attempt does not count as contained (`world.judge`). The host checks files,
listeners, processes and secrets itself and does not rely on the program's output. The cases are in `files.py`,
`processes.py`, `system.py`, `beyond.py` and `ends.py`, harmless programs in `controls.py`;
`run.all_cases` returns them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

LIMITS = ExecLimits(
    cpu_s=0.3,
    wall_s=30.0,
    memory_mb=96,
    num_processes=12,
    num_threads=12,
    file_mb=8,
    disk_mb=8,
    num_inodes=256,
    fetch_mb=1,
)
"""Small limits, so that programs reach them quickly. Only a program that hangs reaches the wall limit."""
SHORT = replace(LIMITS, wall_s=4.0)
"""For programs that reach the wall limit; long enough for a busy host to start one, and not to count as overloaded."""

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
class EscapeCase:
    """One attack."""

    name: str
    program: str
    policy: Policy = "pure"
    then: str = ""
    """A second program, run after the first has ended; it prints ESCAPED if the first left something."""
    needs: frozenset[str] = frozenset()
    """Targets that the host must provide: "victim" (a process), "net" (listeners), "suid" (a program)."""
    ends: frozenset[ExecStatus] = frozenset()
    """Statuses with which it may end during an attempt, besides POLICY."""
    must_end: frozenset[ExecStatus] = frozenset()
    """Statuses with which it must end; empty for any."""
    limits: ExecLimits = LIMITS
    stdin: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    check: Callable[[ExecResult, dict[str, Any]], str] | None = None
    """Checks the result, given the facts of `World`; returns the problem, or ""."""
    excepted: frozenset[Isolation] = frozenset()
    """Levels with a documented exception for this case."""
    census: bool = False
    """Check afterwards that none of its processes is left."""


def case(name: str, program: str, policy: Policy = "pure", **options: Any) -> EscapeCase:
    """Return a case; options that are sets may be any iterable."""
    for key in ("needs", "ends", "must_end", "excepted"):
        if key in options:
            options[key] = frozenset(options[key])
    return EscapeCase(name, program, policy, **options)


def source(program: str, facts: dict[str, Any]) -> str:
    """Return a program with its preamble, which contains the facts of its world."""
    return PREAMBLE.replace("@WORLD@", repr(json.dumps(facts))) + program
