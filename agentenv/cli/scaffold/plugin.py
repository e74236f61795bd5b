"""Write a plugin distribution: an environment, its data, its tests and an agent_func.py, ready to install and change.

`template/common/` has the files of every plugin, and `template/KIND/` the environment, its data and its tests. Their
names end in `.tmpl`, so that no tool treats them as our code. `@package@`, `@Class@`, `@dist@`, `@about@` and `@logs@`
in them, and the folder `package`, are placeholders.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import agentenv
from agentenv.episode.registry import installed_envs
from agentenv.errors import ConfigError

_TEMPLATE = Path(__file__).parent / "template"
PluginKind = Literal["multi_turn", "single_turn", "tools", "game"]
_LOGS: dict[PluginKind, str] = {
    "multi_turn": '"in_place": "last", "attempts": "last"',
    "single_turn": '"is_number": "last"',
    "tools": '"calls": "last"',
    "game": '"stones": "last", "allowed": "last"',
}
"""Which values of `info` the trainers' logs show."""
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_MAX_CHARS = 64
"""Longest name: file systems allow 255 characters, including prefixes and suffixes."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """The files that `make_plugin` wrote."""

    folder: Path
    name: str
    """Name of the package and of the environment, for `--env`."""
    class_name: str
    files: tuple[Path, ...]
    """Paths relative to `folder`, in order."""


def make_plugin(name: str, out: str | Path | None = None, *, kind: PluginKind = "multi_turn") -> Plugin:
    """Write a plugin into a new or empty folder; existing files are never changed.

    Args:
        name: the environment's name: lower-case letters, digits and underscores (or dashes), at most 64 characters.
        out: the folder; by default one of that name in the current folder.
        kind: the environment that it begins with.

    Raises:
        ConfigError: the name is invalid or already taken, or the folder is not empty.
    """
    package = _package_name(name)
    folder = Path(out).expanduser() if out is not None else Path(package)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"agentenv new: expected a new or empty folder, got {str(folder)!r}. Name another with --out."
        )
    first_line = (_TEMPLATE / kind / "src/package/env.py.tmpl").read_text("utf-8").partition("\n")[0]
    words = {
        "@about@": first_line.strip('"').partition(": ")[2],
        "@logs@": _LOGS[kind],
        "@package@": package,
        "@Class@": _class_name(package),
        "@dist@": package.replace("_", "-"),
    }
    files = []
    for root in (_TEMPLATE / "common", _TEMPLATE / kind):
        for source in root.rglob("*.tmpl"):
            name = source.name.removesuffix(".tmpl").replace("dot-", ".").replace("test_package", f"test_{package}")
            parts = source.relative_to(root).parent.parts
            target = folder.joinpath(*(package if part == "package" else part for part in parts), name)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text("utf-8")
            for placeholder, word in words.items():
                text = text.replace(placeholder, word)
            target.write_text(text, "utf-8")
            files.append(target.relative_to(folder))
    return Plugin(folder, package, words["@Class@"], tuple(sorted(files)))


def _package_name(name: str) -> str:
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or keyword.iskeyword(_class_name(package)):
        raise ConfigError(f"agentenv new: expected a new name, got {name!r}, a keyword of Python.")
    if not _NAME.fullmatch(package):
        raise ConfigError(
            f"agentenv new: expected a name of lower-case letters, digits and underscores, got {name!r}. "
            "Use a name like word_sort, or name the environment of a file with --env."
        )
    if len(package) > _MAX_CHARS:
        raise ConfigError(
            f"agentenv new: expected a name of at most {_MAX_CHARS} characters, got {name!r:.80}, {len(name)} long. "
            "Shorten it."
        )
    if hasattr(agentenv, _class_name(package)) or _class_name(package) in ("AgentExecutor", "AgentRunner"):
        raise ConfigError(
            f"agentenv new: expected a new name, got {name!r}, whose class would be {_class_name(package)}, the "
            "name of one of agentenv's."
        )
    if package in installed_envs():
        raise ConfigError(f"agentenv new: expected a new name, got {name!r}, an installed environment.")
    if package in sys.stdlib_module_names or package == "tests" or importlib.util.find_spec(package) is not None:
        raise ConfigError(f"agentenv new: expected a new name, got {name!r}, an importable module.")
    return package


def _class_name(package: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in package.split("_"))
