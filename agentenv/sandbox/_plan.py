"""What a zygote of each level would be on this machine: its interpreter, its users, what it imports from."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from agentenv.sandbox.types import Isolation

NUM_USERS = 1024
"""Users of our own: one for the zygote, one for each program that runs at a time."""
_FIRST_USER = 0x70000000
"""Above what subuid files and container managers give out."""
_SETUID_AND_SETGID = 1 << 7 | 1 << 6


@dataclass(frozen=True)
class Plan:
    """What a zygote is to be."""

    tier: Isolation
    ids: tuple[int, int] | None
    """Users to run programs as: the first, and how many; None as who we are."""
    python: str
    paths: tuple[str, ...] = ()
    """More folders to import from."""
    preimport: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Folders that programs are not to see although they lie in what is shown."""


def user_range() -> tuple[int, int] | None:
    """Users that nobody else is, when we may become them; None for a plain user, or when there are none."""
    if os.geteuid() != 0 or not _may_change_users():
        return None
    for line in reversed(_lines("/proc/self/uid_map")):
        inside, _, count = (int(field) for field in line.split())
        if inside <= _FIRST_USER and inside + count >= _FIRST_USER + NUM_USERS:
            return _FIRST_USER, NUM_USERS
        if count >= 2 * NUM_USERS:
            # The end of what a container has, below the nobody of 16 bits.
            return inside + count - 2 * NUM_USERS, NUM_USERS
    return None


def runs_as_host_root() -> bool:
    """Whether the users that programs would run as include the host's root."""
    return os.geteuid() == 0 and any(line.split()[:2] == ["0", "0"] for line in _lines("/proc/self/uid_map"))


def _may_change_users() -> bool:
    held = [int(line.split()[1], 16) for line in _lines("/proc/self/status") if line.startswith("CapEff:")]
    return all(bits & _SETUID_AND_SETGID == _SETUID_AND_SETGID for bits in held)


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def interpreters() -> list[str]:
    """This interpreter, and the system's, which other users can surely reach."""
    found = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    return list(dict.fromkeys(os.path.realpath(path) for path in found if path and os.access(path, os.X_OK)))


def reachable_by_others(path: str) -> bool:
    """Whether a user who is nobody here may get to it and read it."""
    here = Path(path)
    try:
        return bool(here.stat().st_mode & 0o004) and all(parent.stat().st_mode & 0o001 for parent in here.parents)
    except OSError:
        return False


def package_folders() -> tuple[str, ...]:
    """Where this environment's packages are, for programs that were promised some."""
    folders = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(os.path.realpath(path) for path in folders if path and os.path.isdir(path)))


def own_folders() -> tuple[str, ...]:
    """Where our own packages lie: tasks with their hidden tests and solutions are among them."""
    specs = [importlib.util.find_spec(name) for name in ("agentenv", "agentenv_envs")]
    found = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    return tuple(dict.fromkeys(os.path.realpath(place) for place in found))


def plans(tier: Isolation, preimport: tuple[str, ...]) -> list[Plan]:
    """What to try for a level, in order; none when it makes no sense for who we are."""
    ids = user_range()
    if ids is None and (tier is Isolation.UID or runs_as_host_root()):
        return []
    pythons = interpreters()
    if ids and tier is not Isolation.NAMESPACES:
        # There programs see the host's folders as they are: those of a private home are closed to other users.
        pythons = [path for path in pythons if reachable_by_others(path)]
    elif pythons:
        pythons = pythons[:1]
    paths = package_folders() if preimport else ()
    return [Plan(tier, ids, python, paths, preimport, own_folders()) for python in pythons]
