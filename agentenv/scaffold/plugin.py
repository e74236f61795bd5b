"""A plugin distribution: an environment, its data, its tests, an agent_func.py, ready to install and to change.

`template/` has its files, with `.tmpl` after their names, so that no tool takes them for code of ours; `@package@`,
`@Class@` and `@dist@` in them, and the folder `package`, stand for the new names.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import agentenv
from agentenv.errors import ConfigError
from agentenv.loading import installed_envs

_TEMPLATE = Path(__file__).parent / "template"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_MAX_CHARS = 64
"""Of a name: file systems take 255, with all that is put around it."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """What was made."""

    folder: Path
    name: str
    """Of the package and of the environment, as `--env` takes it."""
    class_name: str
    files: tuple[Path, ...]
    """Below `folder`, in order."""


def make_plugin(name: str, out: str | Path | None = None) -> Plugin:
    """Write a plugin into a folder that is new or empty; nothing that is there is changed.

    Args:
        name: of the environment: lower case, digits and underscores (or dashes), at most 64 characters.
        out: the folder; by default one of that name, here.

    Raises:
        ConfigError: the name is no name, or already means something; or there is something in the folder.
    """
    package = _checked(name)
    folder = Path(out).expanduser() if out is not None else Path(package)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"agentenv new: expected a new or empty folder, got {str(folder)!r}. Name another with --out."
        )
    words = {"@package@": package, "@Class@": _class_name(package), "@dist@": package.replace("_", "-")}
    files = []
    for source in sorted(path for path in _TEMPLATE.rglob("*.tmpl")):
        named = source.name.removesuffix(".tmpl").replace("dot-", ".").replace("test_package", f"test_{package}")
        parents = source.relative_to(_TEMPLATE).parent.parts
        target = folder.joinpath(*(package if part == "package" else part for part in parents), named)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_filled(source.read_text("utf-8"), words), "utf-8")
        files.append(target.relative_to(folder))
    return Plugin(folder, package, words["@Class@"], tuple(files))


def _checked(name: str) -> str:
    package = name.replace("-", "_")
    if not _NAME.fullmatch(package) or keyword.iskeyword(package) or keyword.iskeyword(_class_name(package)):
        raise ConfigError(
            f"agentenv new: expected a name of lower-case letters, digits and underscores, got {name!r}. "
            "Such as word_sort."
        )
    if len(package) > _MAX_CHARS:
        raise ConfigError(
            f"agentenv new: expected a name of at most {_MAX_CHARS} characters, got {name!r:.80}, {len(name)} long. "
            "Shorten it."
        )
    if hasattr(agentenv, _class_name(package)) or _class_name(package) in ("AgentExecutor", "AgentRunner"):
        raise ConfigError(
            f"agentenv new: expected a new name, got {name!r}, whose class would be {_class_name(package)} like one of "
            "agentenv's. Choose another."
        )
    if package in installed_envs():
        raise ConfigError(f"agentenv new: expected a new name, got {name!r}, an installed environment. Choose another.")
    if package in sys.stdlib_module_names or package == "tests" or importlib.util.find_spec(package) is not None:
        raise ConfigError(f"agentenv new: expected a new name, got {name!r}, an importable module. Choose another.")
    return package


def _class_name(package: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in package.split("_"))


def _filled(text: str, words: dict[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text
