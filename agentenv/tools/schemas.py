"""Schemas of tools (`schema_of`).

This module imports transformers and torch: `from agentenv.tools import schema_of` takes these seconds when the file of
an environment is loaded, and not in the first `reset`, where all episodes would wait.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers.utils import get_json_schema

from agentenv.errors import ConfigError
from agentenv.tools.arguments import form_of

with contextlib.suppress(ImportError):
    import torch  # noqa: F401 -- transformers imports it for the first type hint, if it is installed

__all__ = ["schema_of"]
_PLAIN = (int, float, str, bool, NoneType, list, tuple, dict, Any)


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
        plain, schemas, others = _misread(function, name)
        schema: dict[str, Any] = dict(get_json_schema(plain))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"schema_of: expected a function with type hints and a docstring that has a line for every parameter under "
            f"Args:, got {name}: {error}. Complete it, or write the schema by hand."
        ) from error
    parameters = schema["function"]["parameters"]
    for key, misread in schemas.items():
        own = _without_definitions(misread, parameters.setdefault("$defs", {}), f"{key!r} of {name}")
        parameters["properties"][key] = {**own, **parameters["properties"][key]}
    parameters |= others
    if not parameters.get("$defs", True):
        del parameters["$defs"]
    return schema


def _misread(function: Callable[..., Any], name: str) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Return the function without hints that transformers misreads, their schemas, and that of `**kwargs`."""
    schemas, others = dict[str, Any](), dict[str, Any]()
    hints, signature = get_type_hints(function), inspect.signature(function)
    kept = []
    for key, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"schema_of: expected parameters that a call can name, got {parameter} of {name}. Take a list, or "
                "a parameter with a name."
            )
        if key not in hints or (_is_plain(hints[key]) and parameter.kind is not parameter.VAR_KEYWORD):
            kept.append(parameter)
            continue
        try:
            schema = form_of(hints[key]).schema
        except (LookupError, NameError, RecursionError) as error:
            raise ConfigError(
                f"schema_of: expected hints of JSON types, enums, dates, dataclasses and pydantic models, got "
                f"{hints[key]!r} for {key!r} of {name}. Change it, or write the schema by hand."
            ) from error
        if parameter.kind is parameter.VAR_KEYWORD:
            others = {"additionalProperties": dict(schema)}
            continue
        schemas[key] = schema
        kept.append(parameter.replace(annotation=Any))
    plain = _stub(function, signature.replace(parameters=kept), hints) if schemas or others else function
    return plain, schemas, others


def _stub(function: Callable[..., Any], signature: inspect.Signature, hints: dict[str, Any]) -> Callable[..., Any]:
    """Return a function with the docstring of another one, and this signature."""

    def stub() -> None:
        pass

    stub.__name__, stub.__doc__ = getattr(function, "__name__", "operation"), inspect.getdoc(function)
    odd = {key: Any for key, each in signature.parameters.items() if each.annotation is Any}
    stub.__annotations__ = {key: hint for key, hint in hints.items() if key in (*signature.parameters, "return")} | odd
    stub.__signature__ = signature  # type: ignore[attr-defined]
    return stub


def _is_plain(hint: Any) -> bool:
    """Return True if transformers reads a hint right."""
    if get_origin(hint) is Literal:
        return True
    arguments = get_args(hint)
    if get_origin(hint) is None or not arguments:
        return isinstance(hint, Hashable) and hint in _PLAIN
    known = get_origin(hint) in (list, tuple, dict, Union, UnionType)
    return known and ... not in arguments and all(map(_is_plain, arguments))


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
