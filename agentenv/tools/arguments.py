"""Arguments of calls: the JSON schemas of type hints, checks by schemas, and values as a function expects them."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import datetime
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union
from weakref import WeakKeyDictionary

from agentenv.core.tool_schemas import Parameter, kinds_of_value

_BASIC: Mapping[Any, Mapping[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, list: {"type": "array"}, tuple: {"type": "array"}, dict: {"type": "object"}, Any: {},
}  # fmt: skip
_DATES: Mapping[Any, str] = {datetime.datetime: "date-time", datetime.date: "date", datetime.time: "time"}
_ARRAYS: Mapping[Any, Callable[[Any], Any]] = {
    list: list, tuple: tuple, set: set, frozenset: frozenset, collections.abc.Sequence: list,
    collections.abc.Iterable: list, collections.abc.Collection: list, collections.abc.Set: set,
}  # fmt: skip
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_FORMS: WeakKeyDictionary[Any, dict[str, Form]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Form:
    """What a type hint says of an argument."""

    schema: Mapping[str, Any]
    read: Callable[[Any], Any] | None = None
    """Return the value of the hint's type for a JSON value, or raise ValueError; None: they are the same."""

    def value(self, given: Any, where: str) -> Any:
        """Return the value for a JSON value.

        Raises:
            ValueError: it does not fit; the message starts with `where`.
        """
        if problem := wrong(where, given, Parameter(self.schema, self.schema)):
            raise ValueError(problem)
        return self.read(given) if self.read else given


def read_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of a call as the function expects them: enums, dates and objects of the hints' classes.

    Args:
        function: what is called.
        given: the arguments as JSON values, by name.
        parameters: the schema of all that is offered to the model; None: the type hints say what is right, and a
            parameter with another hint takes everything.

    Raises:
        ValueError: some are wrong; the message says which.
    """
    forms = forms_of(function)
    if parameters is None:
        known = {name: Parameter(form.schema, form.schema) for name, form in forms.items()}
    else:
        known = {name: Parameter(parameters).at(name) for name in given}
    if problems := [problem for name in given if (problem := wrong(name, given[name], known.get(name)))]:
        raise ValueError("; ".join(problems))
    read = dict(given)
    for name, value in given.items():
        if isinstance(value, float) and name in known and known[name].kinds == {"integer"}:
            read[name] = int(value)
        form = forms.get(name)
        if form is not None and form.read is not None and value is not None:
            try:
                read[name] = form.read(value)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{name}: {_message(error)}") from error
    return read


def wrong(name: str, value: Any, parameter: Parameter | None) -> str:
    """Return the error in an argument, judged by the types and choices in its schema; empty if it is valid."""
    kinds = parameter.kinds if parameter is not None else set()
    if parameter is None or (value is None and "null" in kinds):
        return ""
    choices = parameter.values
    if choices is not None and value not in choices:
        return f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r:.80}"
    if not kinds or kinds & kinds_of_value(value):
        return ""
    shown = " or ".join(sorted(kinds - {"integer"} if "number" in kinds else kinds))
    return f"{name} must be of type {shown}, got {value!r:.80}"


def forms_of(function: Callable[..., Any]) -> dict[str, Form]:
    """Return the forms of a function's parameters whose type hints are known, cached for each function."""
    owner = getattr(function, "__func__", function)
    with contextlib.suppress(TypeError):  # has no weak references
        if owner in _FORMS:
            return _FORMS[owner]
    forms: dict[str, Form] = {}
    try:
        hints, parameters = typing.get_type_hints(function), [*inspect.signature(function).parameters.items()]
    except (AttributeError, NameError, TypeError, ValueError):  # a hint that cannot be evaluated, or no signature
        hints, parameters = {}, []
    for name, parameter in parameters:
        if name in hints and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            with contextlib.suppress(LookupError, NameError, RecursionError):
                forms[name] = form_of(hints[name])
    with contextlib.suppress(TypeError):
        _FORMS[owner] = forms
    return forms


def form_of(hint: Any) -> Form:
    """Return the form of a type hint.

    Raises:
        LookupError: it is not known.
    """
    while (inner := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)) is not None:
        hint = inner  # NewType, and aliases of Python 3.12
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    try:
        if hint in _BASIC:
            return Form(_BASIC[hint])
        if hint in _DATES:
            return Form({"type": "string", "format": _DATES[hint]}, hint.fromisoformat)
    except TypeError as error:  # cannot be hashed
        raise LookupError(hint) from error
    if origin is typing.Annotated or origin in (typing.Required, typing.NotRequired):
        return form_of(arguments[0])
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return Form(_listed([*arguments]))
    if (origin or hint) in _ARRAYS:
        return _array(_ARRAYS[origin or hint], arguments, is_tuple=origin is tuple)
    if (origin or hint) in _OBJECTS:
        item = form_of(arguments[1]) if arguments else Form({})
        schema = {"type": "object", **({"additionalProperties": item.schema} if arguments else {})}
        return Form(schema, lambda given: {key: item.value(value, key) for key, value in given.items()})
    if inspect.isclass(hint):
        return _form_of_class(hint)
    raise LookupError(hint)


def _form_of_class(cls: type[Any]) -> Form:
    if issubclass(cls, Enum) and len(cls):
        return Form(_listed([member.value for member in cls]), cls)
    if callable(getattr(cls, "model_json_schema", None)):  # pydantic
        return Form(cls.model_json_schema(), cls.model_validate)
    if typing.is_typeddict(cls):
        hints = typing.get_type_hints(cls, include_extras=True)  # `__required_keys__` misses hints in quotes
        marks = {name: typing.get_origin(hint) for name, hint in hints.items()}
        required = {name for name in cls.__required_keys__ if marks[name] is not typing.NotRequired}
        required |= {name for name in hints if marks[name] is typing.Required}
        return _object({name: form_of(hints[name]) for name in hints}, required, dict)
    if dataclasses.is_dataclass(cls):
        hints, fields = typing.get_type_hints(cls), [each for each in dataclasses.fields(cls) if each.init]
        no_default = dataclasses.MISSING
        required = {each.name for each in fields if each.default is each.default_factory is no_default}
        return _object({each.name: form_of(hints[each.name]) for each in fields}, required, cls)
    raise LookupError(cls)


def _object(forms: Mapping[str, Form], required: collections.abc.Set[str], make: Callable[..., Any]) -> Form:
    schema = {
        "type": "object",
        "properties": {name: form.schema for name, form in forms.items()},
        "required": [name for name in forms if name in required],
    }

    def read(given: Mapping[str, Any]) -> Any:
        others, missing = sorted(given.keys() - forms.keys()), sorted(required - given.keys())
        if others or missing:
            raise ValueError(f"it lacks {missing} and has unknown {others}")
        return make(**{name: forms[name].value(value, name) for name, value in given.items()})

    return Form(schema, read)


def _array(make: Callable[[Any], Any], arguments: tuple[Any, ...], *, is_tuple: bool) -> Form:
    if is_tuple and arguments and arguments[-1] is not ...:
        items = [form_of(each) for each in arguments]

        def read_tuple(given: list[Any]) -> Any:
            pairs = zip(items, given, strict=True)
            return tuple(item.value(value, f"item {place}") for place, (item, value) in enumerate(pairs))

        return Form({"type": "array", "prefixItems": [item.schema for item in items]}, read_tuple)
    item = form_of(arguments[0]) if arguments else Form({})
    schema = {"type": "array", **({"items": item.schema} if arguments else {})}
    return Form(schema, lambda given: make(item.value(value, f"item {place}") for place, value in enumerate(given)))


def _union(arguments: tuple[Any, ...]) -> Form:
    ways = [form_of(each) for each in arguments if each is not type(None)]
    kinds = [way.schema.get("type") if way.schema.keys() == {"type"} else None for way in ways]
    schema: dict[str, Any] = {"anyOf": [way.schema for way in ways]}
    if len(ways) == 1:
        schema = {**ways[0].schema}
    elif all(kinds):
        schema = {"type": sorted({str(kind) for kind in kinds})}
    if type(None) in arguments:
        schema["nullable"] = True

    def read(given: Any) -> Any:
        if given is None and type(None) in arguments:
            return None
        problems = []
        for way in ways:
            try:
                return way.value(given, "it")
            except (ValueError, TypeError) as error:
                problems.append(_message(error))
        raise ValueError(" or ".join(problems))

    return Form(schema, read)


def _listed(values: list[Any]) -> dict[str, Any]:
    """Return the schema of some JSON values; raise LookupError for others."""
    names = [_BASIC.get(type(value), {}).get("type") for value in values]
    if None in names or not all(isinstance(value, str | int | float | bool | None) for value in values):
        raise LookupError(values)
    kinds = list(dict.fromkeys(names))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _message(error: Exception) -> str:
    """Return the message of an error in one line; pydantic's without its links."""
    if callable(details := getattr(error, "errors", None)):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details())
    return str(error)
