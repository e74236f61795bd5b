"""Names to things: environments, agent_func files, built-in data and models. Nothing is guessed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
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
    """Return every environment in the entry point group `agentenv.envs` of installed packages, by name.

    Raises:
        ConfigError: two packages offer the same name.
    """
    found: dict[str, EnvEntry] = {}
    for entry in _offered():
        known = found.setdefault(entry.name, entry)
        if known != entry:
            raise ConfigError(
                f"environment {entry.name!r}: expected one package to offer it, got {known.distribution} "
                f"({known.value}) and {entry.distribution} ({entry.value}). Uninstall one, or name it as module:Attr."
            )
    return dict(sorted(found.items()))


def _offered() -> tuple[EnvEntry, ...]:
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
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    packages = [point.dist.name if point.dist is not None else "?" for point in points]
    return tuple(
        EnvEntry(_normal(point.name), point.value, package) for point, package in zip(points, packages, strict=True)
    )


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
        return _env_class(_attribute(_import(path), attribute, spec), spec)
    envs = installed_envs()
    if _normal(spec) in envs:
        module, _, attribute = envs[_normal(spec)].value.partition(":")
        return _env_class(getattr(_import(module), attribute, None), spec)
    raise ConfigError(
        f"--env: expected an installed environment ({', '.join(envs) or 'none is installed'}), module:Attr, "
        f"path/file.py[:Attr] or KIND:NAME with a KIND of {', '.join(GUESTS)}, got {spec!r}.{did_you_mean(spec, envs)} "
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
                f"--env: expected {spec!r} to name a class, got no {attribute!r} there."
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
    names = list(own.values())
    raise ConfigError(
        f"--env: expected one AgentInstance in {spec}, or one class with `run`, got {names}. Write {spec}:ClassName."
    )


def _env_class(value: Any, spec: str) -> type[Any]:
    if owns_its_loop(value):
        cls: type[Any] = value
        return cls
    if inspect.isclass(value) and (issubclass(value, AgentInstance) or hasattr(value, "step")):
        return as_agent(value)
    raise ConfigError(
        f"--env: expected {spec!r} to name a class with a `step` method, got {value!r}. "
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
        raise ConfigError(f"{path}: expected an existing .py file, got none. Check the path.")
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
        raise ConfigError(
            f"{_place(error, file)}: expected to import, got {_error_text(error)}. Fix the file."
        ) from error
    return module


def _place(error: BaseException, file: Path) -> str:
    """Return file and line of the user's code that raised `error`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{file}:{line}" if line else str(file)


def _error_text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f'SystemExit: {error} (what calls sys.exit belongs under `if __name__ == "__main__":`)'
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--env: expected to import the module {module!r}, got {_error_text(error)}. Install it or fix PYTHONPATH."
        ) from error


def builtin_datasets() -> dict[str, Path]:
    """Return the data that installed environments ship, by name: the `datasets` of their classes.

    An environment that cannot be imported is left out, so that the others still work.
    """
    found: dict[str, Path] = {}
    for entry in _offered():
        with contextlib.suppress(ConfigError):
            own = getattr(load_env(entry.value), "datasets", {})
            found.update({_normal(key): Path(path) for key, path in own.items()})
    return found
