"""Schemas of tools (`schema_of`).

This module imports transformers and torch: `from agentenv.tools import schema_of` takes these seconds when the file of
an environment is loaded, and not in the first `reset`, where all episodes would wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from transformers.utils import get_json_schema

from agentenv.errors import ConfigError

with contextlib.suppress(ImportError):
    import torch  # noqa: F401 -- transformers imports it for the first type hint, if it is installed

__all__ = ["schema_of"]


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's JSON schema as a tool for chat templates, from its type hints and Google-style docstring.

    Source: transformers.utils.get_json_schema, 4.56 to 5.19.

    Raises:
        ConfigError: a parameter has no type hint, or no line under `Args:`.
    """
    try:
        return dict(get_json_schema(function))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"schema_of: expected a function with type hints and a docstring that has a line for every parameter under "
            f"Args:, got {name}: {error}. Complete it, or write the schema by hand."
        ) from error
