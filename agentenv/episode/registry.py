"""Names to things: environments, agent_func files, built-in data and models. Nothing is guessed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from agentenv._util.suggest import did_you_mean
from agentenv.core.agent import AgentInstance
from agentenv.episode.endpoint.agent import ChatAgentSource, owns_its_loop
from agentenv.episode.source import EnvSource, as_agent
from agentenv.errors import ConfigError

ENTRY_POINT_GROUP = "agentenv.envs"
GUESTS: Mapping[str, str] = {
    "gem": "agentenv.interop.gem",
    "inspect": "agentenv.interop.inspect_guest",
    "openenv": "agentenv.interop.openenv_guest",
    "textarena": "agentenv.interop.textarena",
    "textworld": "agentenv.interop.textworld",
    "verifiers": "agentenv.interop.verifiers_guest",
}
"""Modules that load environments of other libraries, by the KIND of `--env KIND:NAME`. Each has `env_class(name)`, the
class of an environment, and `names()`, their summaries by name."""


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """An installed environment, as `agentenv list` shows it; nothing of it is imported."""

    name: str
    value: str
    """module:Attr"""
    distribution: str


def installed_envs() -> dict[str, EnvEntry]:
    """Return the environments that one package offers, by name; `load_env` refuses a name that two offer."""
    offered = offered_envs()
    num_offers = Counter(entry.name for entry in offered)
    return {entry.name: entry for entry in offered if num_offers[entry.name] == 1}


def offered_envs() -> tuple[EnvEntry, ...]:
    """Return every environment in the entry point group `agentenv.envs` of installed packages, in order of name."""
    changes: list[tuple[str, int | None]] = []  # a folder changes if, for example, a package is installed into it
    for path in map(os.path.abspath, sys.path):
        try:
            changes.append((path, os.stat(path).st_mtime_ns))
        except OSError:
            changes.append((path, None))
    return _read_offered(tuple(changes))


@functools.lru_cache(maxsize=4)
def _read_offered(paths: tuple[tuple[str, int | None], ...]) -> tuple[EnvEntry, ...]:
    """Read once for each state of `sys.path`: reading all packages' metadata takes 10 ms."""
    # Sorted: metadata has them in the order of whichever tool built the package.
    points = entry_points(group=ENTRY_POINT_GROUP)
    packages = [point.dist.name if point.dist is not None else "?" for point in points]
    found = {
        EnvEntry(_normal(point.name), point.value, package) for point, package in zip(points, packages, strict=True)
    }
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.value, entry.distribution)))


def _normal(name: str) -> str:
    return name.replace("-", "_")


def load_env(spec: str) -> type[Any]:
    """Return the class behind an id: an entry point's name, `path/file.py[:Attr]`, `module:Attr` or `KIND:NAME`.

    KIND is a library of `GUESTS`, and NAME an environment there.

    It is an AgentInstance, or an agent with its own loop (`run` and no `step`).

    Raises:
        ConfigError: there is none, or it is neither; names what was tried and the nearest name.
        MissingDependency: the library of KIND is not installed.
    """
    path, _, attribute = spec.partition(":")
    if path in GUESTS:
        return _env_class(_import(GUESTS[path]).env_class(attribute), spec)
    if path.endswith(".py"):
        return _env_class(_attribute(load_file(path), attribute, spec), spec)
    if attribute:
        is_installed = any(entry.name == _normal(path) for entry in offered_envs())
        if is_installed and not (importlib.util.find_spec(path) and hasattr(_import(path), attribute)):
            raise ConfigError(
                f"environment: expected {path}, or {path}:NUMBER in a mixture, got {spec!r}. Correct the name."
            )
        return _env_class(_attribute(_import(path), attribute, spec), spec)
    offered = offered_envs()
    own = [entry for entry in offered if entry.name == _normal(spec)]
    if len(own) > 1:
        found = " and ".join(f"{entry.distribution} ({entry.value})" for entry in own)
        raise ConfigError(
            f"environment {own[0].name!r}: expected one package to offer it, got {found}. "
            "Uninstall one, or name it as module:Attr."
        )
    if own:
        module, _, attribute = own[0].value.partition(":")
        return _env_class(getattr(_import(module), attribute, None), spec)
    envs = dict.fromkeys(entry.name for entry in offered)
    hint = f" Install the folder: pip install -e {spec}." if Path(spec, "pyproject.toml").is_file() else ""
    if spec.endswith((".yaml", ".yml", ".json")):
        hint = " Name one environment: only `run` and `train` take files of several."
    raise ConfigError(
        f"environment: expected an installed one ({', '.join(envs) or 'none is installed'}), module:Attr, "
        f"path/file.py[:Attr] or KIND:NAME with a KIND of {', '.join(GUESTS)}, got {spec!r}."
        f"{hint or did_you_mean(spec, envs)} "
        "`agentenv list` shows what is installed."
    )


def env_source(spec: str | type[Any], kwargs: Mapping[str, Any]) -> EnvSource | ChatAgentSource:
    """Return the source of episodes of a class, or of the class behind an id, constructed with these arguments.

    Raises:
        ConfigError: as `load_env`; or the constructor does not take the arguments.
        MissingDependency: an agent with its own loop needs a server, whose libraries are not installed.
    """
    cls = load_env(spec) if isinstance(spec, str) else _env_class(spec, getattr(spec, "__name__", repr(spec)))
    return ChatAgentSource.of(cls, kwargs) if owns_its_loop(cls) else EnvSource(cls, kwargs)


def _attribute(module: ModuleType, attribute: str, spec: str) -> Any:
    if attribute:
        if not hasattr(module, attribute):
            names = [name for name, value in vars(module).items() if inspect.isclass(value)]
            raise ConfigError(
                f"environment: expected {spec!r} to name a class, got no {attribute!r} there."
                f"{did_you_mean(attribute, names, 'Check the name.')}"
            )
        return getattr(module, attribute)
    classes: dict[Any, str] = {}
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            classes.setdefault(value, name)  # by the module's name for it: a class factory may have given it another
    own = {c: name for c, name in classes.items() if issubclass(c, AgentInstance)}
    own = own or {c: name for c, name in classes.items() if owns_its_loop(c)}
    if len(own) == 1:
        return next(iter(own))
    names, advice = list(own.values()), f"Write {spec}:ClassName."
    if not names and hasattr(module, "reward_func"):
        advice = (
            f"A reward_func is not an environment: `agentenv run --reward_func_path {spec} --data DATA` tries it, "
            f"and `agentenv rm serve {spec}` serves it."
        )
    raise ConfigError(
        f"environment: expected one AgentInstance in {spec}, or one class with `run`, got {names}. {advice}"
    )


def _env_class(value: Any, spec: str) -> type[Any]:
    if owns_its_loop(value):
        cls: type[Any] = value
        return cls
    if inspect.isclass(value) and (issubclass(value, AgentInstance) or hasattr(value, "step")):
        return as_agent(value)
    raise ConfigError(
        f"environment: expected {spec!r} to name a class with a `step` method, got {value!r}. "
        "Name a class: a subclass of agentenv.AgentInstance, or one with `run` if the agent has its own loop."
    )


def load_file(path: str | Path) -> ModuleType:
    """Import a Python file by path.

    It is put in `sys.modules`, which dataclasses and pickle need, and its folder at the end of `sys.path`, so that it
    may import its neighbors without hiding other modules.

    Raises:
        ConfigError: no such file, not a .py file, or it raised while being imported.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"{path}: expected an existing .py file, got none at {file}. Check the path.")
    name = f"agentenv_file_{file.stem}_{crc32(str(file).encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python module, got a file that cannot be one. Check the path.")
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        package = str(getattr(error, "name", "")).partition(".")[0]
        advice = "Fix the file."
        if package in ("openrlhf", "molt"):  # stand-ins are there for an agent_func file
            advice = "agentenv stands in for openrlhf.utils.agent and molt.agents only: correct the name, or install "
            advice = f"{advice}{package}." if sys.modules.get(package) else "Name it as agent_func_path, not as env."
        raise ConfigError(f"{_place(error, file)}: expected to import, got {_error_text(error)}. {advice}") from error
    return module


def _place(error: BaseException, file: Path | None = None) -> str:
    """Return file and line of the user's code that raised `error`, in `file` if given; empty if none ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    place = "" if file is None else str(file)
    for name, line in ((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)):
        is_ours = name in (__file__, importlib.__file__) or name.startswith("<frozen")
        if name == str(file) or (file is None and not is_ours):
            place = f"{name}:{line}"
    return place


def _error_text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f'SystemExit: {error} (what calls sys.exit belongs under `if __name__ == "__main__":`)'
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        place = _place(error)
        advice = f" ({place}). Fix it, or install what it imports." if place else ". Install it or fix PYTHONPATH."
        raise ConfigError(
            f"environment: expected to import the module {module!r}, got {_error_text(error)}{advice}"
        ) from error


def builtin_datasets(*wanted: object) -> dict[str, Path]:
    """Return the data that installed environments ship, by name, without names of different files.

    Raises:
        ConfigError: a name of `wanted` has different files.
    """
    paths: dict[str, list[Path]] = {}
    for name, path in offered_datasets():
        paths.setdefault(name, []).append(path)
    for name, found in paths.items():
        if name in wanted and len(found) > 1:
            raise ConfigError(
                f"data {name!r}: expected one environment to offer it, got {' and '.join(map(str, found))}. "
                "Name the file."
            )
    return {name: found[0] for name, found in paths.items() if len(found) == 1}


def offered_datasets() -> list[tuple[str, Path]]:
    """Return name and file of the data that installed environments ship: the `datasets` of their classes.

    An environment that cannot be imported is left out, so that the others still work.
    """
    found: dict[tuple[str, Path], None] = {}  # a file that two environments offer is there once
    for entry in offered_envs():
        with contextlib.suppress(ConfigError):
            own = getattr(load_env(entry.value), "datasets", {})
            found |= dict.fromkeys((_normal(key), Path(path)) for key, path in own.items())
    return list(found)
