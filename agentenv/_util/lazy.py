"""Packages whose names are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names live in other modules.

    Args:
        package: `__name__` of the package.
        names: the module of each name, in full. A module that is its own name, such as `errors`, is imported itself.

    Example::

        __getattr__ = lazy_names(__name__, {"Chat": "agentenv.chat.chat"})
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(names[name])
        value = module if names[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # so that the next use does not come here
        return value

    return get
