"""The configuration of a zygote for each level: its interpreter, its users, its import paths.

Of installed packages programs see those that they ask for and what these require, by the files they recorded. Other
distributions may hold tasks with their labels.
"""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from agentenv.sandbox.types import Isolation

NUM_USERS = 1024
"""Size of a range of user ids: one for the zygote, one for each concurrent program."""
_MAX_RANGES = 1024
_WORK_FOLDERS = ("/work", "/sandbox-work")
"""Working folders of programs: the first one in which no interpreter or package lies, which it would hide."""
_FIRST_USER = 0x70000000
"""First user id; above the ranges that subuid files and container managers assign."""
_SETUID_AND_SETGID = 1 << 7 | 1 << 6
_REQUIREMENT = re.compile(r"^Requires-Dist: *([\w.-]+)(?: *\[([^]]*)\])?([^;\n]*)(.*)$", re.M)
_EXTRA = re.compile(r"""extra *== *["']([\w.-]+)["']""")


@dataclass(frozen=True)
class Plan:
    """The configuration of a zygote."""

    isolation: Isolation
    ids: tuple[int, int, int] | None
    """User ids to run programs as: the first, the size of a range, and the number of ranges; None for the current user.
    The namespaces level uses the first range; each zygote of another level reserves a later one."""
    python: str
    paths: tuple[str, ...] = ()
    """Additional import folders."""
    entries: tuple[str, ...] = ()
    """What programs see of these folders, unless their interpreter's folders contain them."""
    preimport: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Folders inside the shown ones that programs must not see."""
    work: str = "/work"
    """The working folder of programs at the level of namespaces."""


def user_ranges() -> tuple[int, int, int] | None:
    """Return unused user ids: the first, the size of a range, the number of ranges; None without the right to them."""
    capabilities = [int(line.split()[1], 16) for line in _lines("/proc/self/status") if line.startswith("CapEff:")]
    may_change_users = all(bits & _SETUID_AND_SETGID == _SETUID_AND_SETGID for bits in capabilities)
    if os.geteuid() != 0 or not may_change_users:
        return None
    for line in reversed(_lines("/proc/self/uid_map")):
        inside, _, count = (int(field) for field in line.split())
        if inside <= _FIRST_USER and inside + count >= _FIRST_USER + _MAX_RANGES * NUM_USERS:
            return _FIRST_USER, NUM_USERS, _MAX_RANGES
        if count >= 4 * NUM_USERS:
            # The upper half of a container's range, below the 16-bit user 65534.
            num_ranges = min(count // NUM_USERS // 2, _MAX_RANGES)
            return inside + count - (1 + num_ranges) * NUM_USERS, NUM_USERS, num_ranges
    return None


def _lines(path: str) -> list[str]:
    return _text(Path(path)).splitlines()


def missing_memory(memory_mb: float, num_programs: int) -> str:
    """Return a warning if programs may together use more memory than this process's cgroups and machine have, or "".

    The kernel kills some of them then.
    """
    have_mb = min(_memory_limits(), default=math.inf) / (1 << 20)
    if memory_mb * num_programs <= have_mb:
        return ""
    return (
        f"expected memory for {num_programs} programs of {memory_mb:g} MiB, got {have_mb:.0f} MiB. "
        "Use fewer run slots, lower memory_mb, or raise the container's memory"
    )


def _memory_limits() -> Iterator[int]:
    """Yield the bytes of memory of this machine, and the limits of this process's cgroups, where they are shown."""
    yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _lines("/proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):
            root, name = ("memory", "memory.limit_in_bytes") if kinds else (".", "memory.max")
            group = Path(path.lstrip("/"))
            for folder in (group, *group.parents):
                yield from (int(text) for text in _lines(f"/sys/fs/cgroup/{root}/{folder}/{name}") if text.isdigit())


def reachable_by_others(path: str) -> bool:
    """Return True if any user may reach and read the file."""
    file = Path(path)
    try:
        return bool(file.stat().st_mode & 0o004) and all(parent.stat().st_mode & 0o001 for parent in file.parents)
    except OSError:
        return False


def package_folders() -> tuple[str, ...]:
    """Return the folders of this environment's packages."""
    folders = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(os.path.realpath(path) for path in folders if path and os.path.isdir(path)))


def own_folders() -> tuple[str, ...]:
    """Return the folders of agentenv and of packages with environments: they hold tests, solutions and labels."""
    specs = [importlib.util.find_spec(name) for name in ("agentenv", "agentenv_envs")]
    folders = [folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]
    folders += environment_folders(package_folders())
    return tuple(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def plans(isolation: Isolation, preimport: tuple[str, ...]) -> list[Plan]:
    """Return the configurations to try for a level, in order; none if the current user cannot run it."""
    ids = user_ranges()
    is_host_root = os.geteuid() == 0 and any(line.split()[:2] == ["0", "0"] for line in _lines("/proc/self/uid_map"))
    if ids is None and (isolation is Isolation.UID or is_host_root):
        return []
    # The system's interpreters are those that other users can reach.
    candidates = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    pythons = list(dict.fromkeys(os.path.realpath(path) for path in candidates if path and os.access(path, os.X_OK)))
    if ids and isolation is not Isolation.NAMESPACES:
        # On these levels programs see the host's folders, and a private home is closed to other users.
        pythons = [path for path in pythons if reachable_by_others(path)]
    elif pythons:
        pythons = pythons[:1]
    paths = package_folders() if preimport else ()
    entries = entries_of(preimport, paths)
    made = []
    for python in pythons:
        shown = (python, *paths)
        work = next(each for each in _WORK_FOLDERS if not any(f"{path}/".startswith(f"{each}/") for path in shown))
        made.append(Plan(isolation, ids, python, paths, entries, preimport, own_folders(), work))
    return made


# --- packages ---------------------------------------------------------------------------------------------------------


def entries_of(modules: Iterable[str], folders: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of modules below import folders, with all files of their distributions and what these require.

    A distribution with environments is left out. Extras are left out unless a requirement names them.
    """
    infos = {_normalized(info.name.split("-")[0]): info for info in _infos(folders)}
    records = {name: "\n" + _text(info / "RECORD") for name, info in infos.items()}
    entries: set[str] = set()
    todo: list[tuple[str, str]] = []
    for module in modules:
        place = "\n" + module.replace(".", "/")
        owners = [(name, "") for name, record in records.items() if f"{place}/" in record or f"{place}." in record]
        todo += owners
        if not owners and (spec := PathFinder.find_spec(module.split(".")[0], folders)):
            # Without a record, as a system's package manager installs it.
            entries.update(spec.submodule_search_locations or filter(None, [spec.origin]))
    seen: set[tuple[str, str]] = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen or name not in infos or _has_environments(infos[name]):
            continue
        seen.add((name, extra))
        entries.update(_recorded(infos[name].parent, records[name]))
        for required, extras, _, marker in _REQUIREMENT.findall(_text(infos[name] / "METADATA")):
            wanted = _EXTRA.search(marker)
            if (wanted[1] if wanted else "") == extra:
                todo += [(_normalized(required), more.strip()) for more in ("", *extras.split(","))]
    return tuple(sorted(path for path in entries if os.path.lexists(path)))


def environment_folders(folders: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of distributions with environments, which hold tasks and labels."""
    ours = [info for info in _infos(folders) if _has_environments(info)]
    return tuple(
        path for info in ours for path in _recorded(info.parent, _text(info / "RECORD")) if os.path.isdir(path)
    )


def _infos(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(Path(folder).glob("*.dist-info"))


def _has_environments(info: Path) -> bool:
    return re.search(r"^\[agentenv\b", _text(info / "entry_points.txt"), re.M) is not None


def _recorded(folder: Path, record: str) -> set[str]:
    """Return the paths of a distribution: its outermost packages, its other folders, and its single files."""
    files = [tuple(row[0].split("/")) for row in csv.reader(record.splitlines()) if row]
    packages = {parts[:-1] for parts in files if parts[-1] == "__init__.py"}
    found = set()
    for parts in files:
        if parts[0] in ("..", "", "__pycache__"):
            continue
        # Several distributions may share a folder without `__init__.py`, if its name is a module's.
        whole = (end for end in range(1, len(parts)) if parts[:end] in packages or not parts[0].isidentifier())
        found.add(parts[: next(whole, len(parts))])
    return {os.path.join(folder, *parts) for parts in found}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
