"""Write a plugin distribution: an environment, its data, its tests and an agent_func.py, ready to install and change.

`template/` has its files. Their names end in `.tmpl`, so that no tool treats them as our code. `@package@`, `@Class@`
and `@dist@` in them, and the folder `package`, are placeholders for the new names.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import agentenv
from agentenv.episode.registry import installed_envs
from agentenv.errors import ConfigError

_TEMPLATE = Path(__file__).parent / "template"
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


def make_plugin(name: str, out: str | Path | None = None) -> Plugin:
    """Write a plugin into a new or empty folder; existing files are never changed.

    Args:
        name: the environment's name: lower-case letters, digits and underscores (or dashes), at most 64 characters.
        out: the folder; by default one of that name in the current folder.

    Raises:
        ConfigError: the name is invalid or already taken, or the folder is not empty.
    """
    package = _package_name(name)
    folder = Path(out).expanduser() if out is not None else Path(package)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"agentenv new: expected a new or empty folder, got {str(folder)!r}. Name another with --out."
        )
    words = {"@package@": package, "@Class@": _class_name(package), "@dist@": package.replace("_", "-")}
    files = []
    for source in sorted(path for path in _TEMPLATE.rglob("*.tmpl")):
        file_name = source.name.removesuffix(".tmpl").replace("dot-", ".").replace("test_package", f"test_{package}")
        parents = source.relative_to(_TEMPLATE).parent.parts
        target = folder.joinpath(*(package if part == "package" else part for part in parents), file_name)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text("utf-8")
        for placeholder, word in words.items():
            text = text.replace(placeholder, word)
        target.write_text(text, "utf-8")
        files.append(target.relative_to(folder))
    return Plugin(folder, package, words["@Class@"], tuple(files))


def _package_name(name: str) -> str:
    package = name.replace("-", "_")
    if not _NAME.fullmatch(package) or keyword.iskeyword(package) or keyword.iskeyword(_class_name(package)):
        raise ConfigError(
            f"agentenv new: expected a name of lower-case letters, digits and underscores, got {name!r}. "
            "Use a name like word_sort."
        )
    if len(package) > _MAX_CHARS:
        raise ConfigError(
            f"agentenv new: expected a name of at most {_MAX_CHARS} characters, got {name!r:.80}, {len(name)} long. "
            "Shorten it."
        )
    if hasattr(agentenv, _class_name(package)) or _class_name(package) in ("AgentExecutor", "AgentRunner"):
        raise ConfigError(
            f"agentenv new: expected a new name, got {name!r}, whose class would be {_class_name(package)}, the "
            "name of one of agentenv's. Choose another."
        )
    if package in installed_envs():
        raise ConfigError(f"agentenv new: expected a new name, got {name!r}, an installed environment. Choose another.")
    if package in sys.stdlib_module_names or package == "tests" or importlib.util.find_spec(package) is not None:
        raise ConfigError(f"agentenv new: expected a new name, got {name!r}, an importable module. Choose another.")
    return package


def _class_name(package: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in package.split("_"))
