"""One way to every backend, by its name and its options as they stand in a configuration.

async with open_sandbox("sandbox_fusion", endpoints=["http://10.0.0.1:8080"]) as sandbox:
    result = await sandbox.run("print(6 * 7)")
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from agentenv.errors import ConfigError
from agentenv.sandbox.types import ExecLimits, Isolation, Sandbox

_BACKENDS = {
    "local": ("agentenv.sandbox.local", "LocalSandbox"),
    "sandbox_fusion": ("agentenv.sandbox.fusion_client", "FusionSandbox"),
    "docker": ("agentenv.sandbox.docker", "DockerSandbox"),
    "e2b": ("agentenv.sandbox.e2b", "E2BSandbox"),
    "ray": ("agentenv.sandbox.ray_pool", "RaySandbox"),
}
BACKENDS = tuple(_BACKENDS)
"""Names that `open_sandbox` knows; a backend's libraries are imported when it is asked for."""


def open_sandbox(backend: str = "local", **options: Any) -> Sandbox:
    """A sandbox to be opened by `async with`: nothing is started yet.

    Args:
        backend: where programs run, one of `BACKENDS`.
        options: of its class; `limits` may be fields of `ExecLimits`, `isolation` and `min_isolation` names.

    Raises:
        ConfigError: there is no such backend, or it has no such options.
        MissingDependency: it needs a package that is not installed.
    """
    if backend not in _BACKENDS:
        raise ConfigError(
            f"sandbox: expected one of {', '.join(BACKENDS)}, got {backend!r}.{_meant(backend, BACKENDS)}"
        )
    module, name = _BACKENDS[backend]
    cls = getattr(importlib.import_module(module), name)
    known = [each for each in inspect.signature(cls).parameters.values() if each.kind is not each.VAR_KEYWORD]
    names = [each.name for each in known]
    if unknown := sorted(set(options) - set(names)):
        raise ConfigError(
            f"sandbox: expected options of {name} ({', '.join(names)}), got {unknown[0]!r}.{_meant(unknown[0], names)}"
        )
    if missing := [each.name for each in known if each.default is each.empty and each.name not in options]:
        raise ConfigError(f"sandbox: expected {' and '.join(missing)} for {name}, got none. Name them.")
    try:
        made: Sandbox = cls(**{key: _read(key, value) for key, value in options.items()})
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"sandbox: expected options of {name}, got {options!r:.300}: {error}. Change them."
        ) from error
    return made


def _meant(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else " Choose one."


def _read(name: str, value: Any) -> Any:
    """An option as its class takes it: what comes from JSON is plain."""
    if name == "limits" and isinstance(value, Mapping):
        return ExecLimits(**value)
    if name in ("isolation", "min_isolation") and isinstance(value, str):
        return Isolation(value)
    return value
