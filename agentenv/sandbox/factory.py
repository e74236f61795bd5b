"""Backends by name, with options as a configuration file holds them.

async with open_sandbox("sandbox_fusion", endpoints=["http://10.0.0.1:8080"]) as sandbox:
    result = await sandbox.run("print(6 * 7)")
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import construct
from agentenv.errors import ConfigError
from agentenv.sandbox.types import ExecLimits, Sandbox

_BACKENDS = {
    "local": ("agentenv.sandbox.local.sandbox", "LocalSandbox"),
    "sandbox_fusion": ("agentenv.sandbox.fusion.client", "FusionSandbox"),
}
BACKENDS = tuple(_BACKENDS)
"""Names that `open_sandbox` accepts; the libraries of a backend are imported when it is opened."""


def open_sandbox(backend: str = "local", **options: Any) -> Sandbox:
    """Create a sandbox for `async with`; nothing is started yet.

    Args:
        backend: where programs run, one of `BACKENDS`.
        options: arguments of its class; `limits` may be a mapping, `isolation` and `min_isolation` may be strings.

    Raises:
        ConfigError: the backend or an option is unknown, or an option has an invalid value.
        MissingDependency: the backend needs a package that is not installed.
    """
    if backend not in _BACKENDS:
        advice = did_you_mean(str(backend), BACKENDS, "Choose one.")
        raise ConfigError(f"sandbox: expected one of {', '.join(BACKENDS)}, got {backend!r}.{advice}")
    module, name = _BACKENDS[backend]
    cls = getattr(importlib.import_module(module), name)
    if isinstance(limits := options.get("limits"), Mapping):
        options["limits"] = construct("sandbox.limits", ExecLimits, limits)
    return construct(f"sandbox {backend}", cls, options)  # type: ignore[no-any-return]
