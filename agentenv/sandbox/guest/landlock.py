"""Landlock: the paths that a process and its children may access. Runs inside the sandbox."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from agentenv.sandbox.guest import linux

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL_FS = 0xFFFF
READ = EXECUTE | READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE
_WRITES = 0x7FF0 | WRITE_FILE
_NEVER = 1 << 6 | 1 << 9 | 1 << 11
"""Device nodes and sockets."""
WORK = (READ | _WRITES) & ~_NEVER
"""Rights in the working folder: all except devices, sockets and ioctls of devices."""
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15


def abi() -> int:
    """Return the version of landlock.

    Raises:
        StepError: landlock is missing (ENOSYS) or disabled (EOPNOTSUPP).
    """
    return linux.syscall("landlock_create_ruleset", None, 0, 1)


def rights(version: int) -> int:
    """Return the file system rights that a version supports."""
    return (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1


class Ruleset:
    """The paths that stay accessible, opened once; each process adds its working folder and enters."""

    def __init__(self, version: int, paths: Mapping[str, int], *, handled: int = ALL_FS) -> None:
        """Open the paths.

        Args:
            version: version of landlock.
            paths: paths and the rights that stay allowed there; a missing path is ignored.
            handled: the rights that are forbidden elsewhere.
        """
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

    def enter(self, folder: str, allowed: int) -> None:
        """Restrict the calling process and its children to the paths, and to the `allowed` rights below `folder`.

        Also forbids TCP, and signals to other processes. Needs no_new_privs.

        Raises:
            StepError: the kernel refused.
        """
        own = self._rule(folder, allowed)
        ruleset = linux.syscall("landlock_create_ruleset", *self._create)
        for rule in self._rules if own is None else (*self._rules, own):
            linux.syscall("landlock_add_rule", ruleset, 1, rule, 0)
        linux.syscall("landlock_restrict_self", ruleset, 0)
        os.close(ruleset)
