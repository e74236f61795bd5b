"""What programs see of installed packages: those that they ask for and what these require, by the files they recorded.

Other distributions may hold tasks with their labels.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

_REQUIREMENT = re.compile(r"^Requires-Dist: *([\w.-]+)(?: *\[([^]]*)\])?([^;\n]*)(.*)$", re.M)
_EXTRA = re.compile(r"""extra *== *["']([\w.-]+)["']""")


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
