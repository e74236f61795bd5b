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


class Ruleset:
    """What stays allowed of all that is in `handled`, opened once; each process adds its own folder and enters."""

    def __init__(self, version: int, paths: Mapping[str, int], *, handled: int = ALL_FS) -> None:
        """A path that does not exist allows nothing."""
        self._handled = handled & rights(version)
        attributes = (ctypes.c_uint64 * 3)(self._handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        self._create = ctypes.byref(attributes), size, 0
        rules = [self._rule(path, allowed) for path, allowed in paths.items()]
        self._rules = [rule for rule in rules if rule is not None]

    def _rule(self, path: str, allowed: int) -> ctypes.Array[ctypes.c_char] | None:
        allowed &= self._handled if os.path.isdir(path) else self._handled & _OF_FILES
        if not allowed or not os.path.exists(path):
            return None
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        return ctypes.create_string_buffer(allowed.to_bytes(8, "little") + fd.to_bytes(4, "little"), 12)

    def enter(self, folder: str = "", allowed: int = 0) -> None:
        """Allow no more than that, and what is `allowed` below `folder`; no TCP, no signal to others.

        From now on, for the calling process and all that it starts. Needs no_new_privs.

        Raises:
            StepError: the kernel refused.
        """
        own = self._rule(folder, allowed) if folder else None
        ruleset = _linux.syscall("landlock_create_ruleset", *self._create)
        for rule in self._rules if own is None else (*self._rules, own):
            _linux.syscall("landlock_add_rule", ruleset, 1, rule, 0)
        _linux.syscall("landlock_restrict_self", ruleset, 0)
        os.close(ruleset)
