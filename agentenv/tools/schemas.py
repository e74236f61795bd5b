"""Schemas of tools (`schema_of`).

This module imports transformers and torch: `from agentenv.tools import schema_of` takes these seconds when the file of
an environment is loaded, and not in the first `reset`, where all episodes would wait.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from transformers.utils import get_json_schema

from agentenv.errors import ConfigError
from agentenv.tools.arguments import form_of

with contextlib.suppress(ImportError):
    import torch  # noqa: F401 -- transformers imports it for the first type hint, if it is installed

__all__ = ["schema_of"]
_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's JSON schema as a tool for chat templates, from its type hints and Google-style docstring.

    Hints are JSON's types and collections of them, `Literal`, enums, dates and times, dataclasses, TypedDicts and
    models of pydantic. A call has a value of the schema, from which `answer_calls` and `Toolset` make that of the hint.

    Source: transformers.utils.get_json_schema, 4.56 to 5.19.

    Raises:
        ConfigError: a parameter has no type hint or one of another type, no line under `Args:`, or no name in a call.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        hints, signature = get_type_hints(function), inspect.signature(function)
        schemas = {}
        for key, parameter in signature.parameters.items():
            if parameter.kind in _UNNAMED:
                raise ConfigError(
                    f"schema_of: expected parameters that a call can name, got {parameter} of {name}. Take a list, or "
                    "a parameter with a name."
                )
            if key in hints:
                try:
                    schemas[key] = form_of(hints[key]).schema
                except LookupError as error:
                    raise ConfigError(
                        "schema_of: expected hints of JSON types, enums, dates, dataclasses and pydantic models, got "
                        f"{hints[key]!r} for {key!r} of {name}. Change it, or write the schema by hand."
                    ) from error
        schema: dict[str, Any] = dict(get_json_schema(_stub(function, signature, hints)))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"schema_of: expected a function with type hints and a docstring that has a line for every parameter under "
            f"Args:, got {name}: {error}. Complete it, or write the schema by hand."
        ) from error
    parameters, definitions = schema["function"]["parameters"], dict[str, Any]()
    for key, hinted in schemas.items():
        own = _without_definitions(hinted, definitions, f"{key!r} of {name}")
        if key in parameters["properties"]:
            parameters["properties"][key] = {**own, **parameters["properties"][key]}
        else:
            parameters["additionalProperties"] = own
    if definitions:
        parameters["$defs"] = definitions
    return schema


def _stub(function: Callable[..., Any], signature: inspect.Signature, hints: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function whose schema has the descriptions of another one's, but no types and no `**kwargs`."""

    def stub() -> None:
        pass

    rest = {key for key, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD and key in hints}
    kept = [each for key, each in signature.parameters.items() if key not in rest]
    stub.__name__, stub.__doc__ = getattr(function, "__name__", "operation"), inspect.getdoc(function)
    stub.__annotations__ = {key: hint if key == "return" else Any for key, hint in hints.items() if key not in rest}
    stub.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return stub


def _without_definitions(schema: Any, definitions: dict[str, Any], where: str) -> Any:
    """Return a schema whose `$defs` are moved into `definitions`, to which `#/$defs/` refers."""
    if isinstance(schema, list | tuple):
        return [_without_definitions(each, definitions, where) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    for key, each in (schema.get("$defs") or {}).items():
        own = _without_definitions(each, definitions, where)
        if definitions.setdefault(key, own) != own:
            raise ConfigError(
                f"schema_of: expected classes with different names, got two of the name {key} for {where}. Rename one."
            )
    return {key: _without_definitions(each, definitions, where) for key, each in schema.items() if key != "$defs"}
