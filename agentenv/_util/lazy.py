"""Packages whose names are imported on first use (PEP 562)."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any


def lazy_names(package: str, more: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names live in other modules.

    The first use of a name reads the package's imports of the form `import A as A`, which re-export for type checkers
    too. `__all__` has their names.

    Args:
        package: `__name__` of the package.
        more: the module of each name that type checkers do not see, in full.

    Example::

        if TYPE_CHECKING:
            from agentenv.chat.chat import Chat as Chat

        __getattr__ = lazy_names(__name__)
    """

    @functools.cache
    def places() -> dict[str, str]:
        tree = ast.parse(inspect.getsource(sys.modules[package]))
        return {
            alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if alias.asname == alias.name
        } | dict(more)

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(places())
        if name.startswith("__") or name not in places():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = places()[name]
        value = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)  # so that the next use does not come here
        return value

    return get
