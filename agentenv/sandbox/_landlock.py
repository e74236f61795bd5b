"""Landlock: what a process may reach by name, from now on and for all that it starts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from agentenv.sandbox import _linux

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL_FS = 0xFFFF
READ = EXECUTE | READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE
_WRITES = 0x7FF0 | WRITE_FILE
_NEVER = 1 << 6 | 1 << 9 | 1 << 11
"""Device nodes and sockets."""
WORK = (READ | _WRITES) & ~_NEVER
"""In its own folder: everything but devices, sockets and ioctls of devices."""
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15


def abi() -> int:
    """Landlock's version here.

    Raises:
        StepError: it is absent (ENOSYS) or switched off (EOPNOTSUPP).
    """
    return _linux.syscall("landlock_create_ruleset", None, 0, 1)


def rights(version: int) -> int:
    """The file system rights that this version knows."""
    return (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1


def restrict(version: int, paths: Mapping[str, int], *, handled: int = ALL_FS) -> None:
    """Allow only `paths` (with what is below them) of all that is in `handled`; no TCP, no signal to others.

    A path that does not exist allows nothing. Needs no_new_privs.

    Raises:
        StepError: the kernel refused.
    """
    known = rights(version)
    attributes = (ctypes.c_uint64 * 3)(handled & known, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _linux.syscall("landlock_create_ruleset", ctypes.byref(attributes), size, 0)
    for path, allowed in paths.items():
        _allow(ruleset, path, allowed & handled & known)
    _linux.syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            allowed &= _OF_FILES
        rule = ctypes.create_string_buffer(allowed.to_bytes(8, "little") + fd.to_bytes(4, "little"), 12)
        if allowed:
            _linux.syscall("landlock_add_rule", ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(fd)
