"""Arguments of calls: the JSON schemas of type hints, checks by schemas, and values as a function expects them."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import datetime
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union
from weakref import WeakKeyDictionary

from agentenv.core.tool_schemas import KINDS, Parameter
from agentenv.errors import InfraError

_DATES: Mapping[Any, str] = {datetime.datetime: "date-time", datetime.date: "date", datetime.time: "time"}
_ARRAYS: Mapping[Any, Callable[[Any], Any]] = {
    list: list, tuple: tuple, set: set, frozenset: frozenset, collections.abc.Sequence: list,
    collections.abc.Iterable: list, collections.abc.Collection: list, collections.abc.Set: set,
}  # fmt: skip
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_UNKNOWN = (AttributeError, NameError, RuntimeError, SyntaxError, TypeError, ValueError)
"""Errors of hints that cannot be evaluated, and of classes without a schema; RuntimeError also if one is in itself."""
_FORMS: WeakKeyDictionary[Any, dict[str, Form]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Form(Parameter):
    """What a type hint says of an argument."""

    make: Callable[[Any], Any] | None = None
    """Return the value of the hint's type for a JSON value, or raise; None: they are the same."""

    def value(self, given: Any, where: str) -> Any:
        """Return the value for a JSON value.

        Raises:
            ValueError: it does not fit, or a class or its validator raised; the message begins with `where`.
            InfraError: a class or its validator raised it.
        """
        given = self.checked(given, where)
        if self.make is None:
            return given
        try:
            return self.make(given)
        except (InfraError, RecursionError):
            raise
        except Exception as error:
            text = str(error)
            if callable(details := getattr(error, "errors", None)):  # pydantic's, without its links
                found = [(".".join(map(str, each["loc"])), each["msg"]) for each in details()]
                text = "; ".join(": ".join(filter(None, each)) for each in found)
            elif not text or not isinstance(error, ValueError):  # it is not about a value
                text = f"{type(error).__name__}: {text}".removesuffix(": ")
            raise ValueError(f"{where}: {text}") from error


def read_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of a call as the function expects them: enums, dates and objects of the hints' classes.

    Args:
        function: what is called.
        given: the arguments as JSON values, by name; they are copied.
        parameters: the schema of all that is offered to the model; empty: the function checks its arguments, which stay
            JSON; None: the type hints say what is right, and a parameter with another hint takes everything.

    Raises:
        ValueError: some are wrong; the message says which.
        RecursionError: they are nested too deep.
        InfraError: a class of a hint, or its validator, raised it.
    """
    read = copy.deepcopy(dict(given))
    if parameters == {}:
        return read
    forms, offered, problems = forms_of(function), Parameter(parameters), []
    for name, value in read.items():
        form = forms.get(name, forms["**"])
        try:
            read[name] = offered.at(name).checked(value, name)
            if parameters is None or (form.make and value is not None):
                read[name] = form.value(read[name], name)
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError("; ".join(problems))
    return read


def forms_of(function: Any) -> dict[str, Form]:
    """Return the forms of a function's parameters, and of its `**kwargs` as "**"; cached for each function.

    The hints are those of the function within a `functools.partial`, a decorator or an object that can be called.
    """
    function = inspect.unwrap(function)
    while not (inspect.isroutine(function) or inspect.isclass(function)):
        partial = isinstance(function, functools.partial)
        function = inspect.unwrap(function.func if partial else type(function).__call__)
    function = getattr(function, "__func__", function)
    with contextlib.suppress(TypeError):  # has no weak references
        if function in _FORMS:
            return _FORMS[function]
    forms = {"**": Form({})}
    try:
        hints = typing.get_type_hints(function) or typing.get_type_hints(function.__init__)
        parameters = [*inspect.signature(function).parameters.items()]
    except _UNKNOWN:  # or there is no signature
        hints, parameters = {}, []
    for name, parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            key = "**" if parameter.kind is parameter.VAR_KEYWORD else name
            forms[key] = Form({})
            with contextlib.suppress(LookupError):
                forms[key] = form_of(hints.get(name, Any))
    with contextlib.suppress(TypeError):
        _FORMS[function] = forms
    return forms


def form_of(hint: Any) -> Form:
    """Return the form of a type hint.

    Raises:
        LookupError: it is not known, or its class has no schema.
    """
    try:
        return _form_of(hint)
    except _UNKNOWN as error:
        raise LookupError(hint) from error


def _form_of(hint: Any) -> Form:
    while (inner := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)) is not None:
        hint = inner  # NewType, and aliases of Python 3.12
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return form_of(arguments[0])
    if hint is Any:
        return Form({})
    if (origin or hint) in KINDS and not arguments:
        return Form({"type": KINDS[origin or hint][0]})
    if hint in _DATES:
        return Form({"type": "string", "format": _DATES[hint]}, make=hint.fromisoformat)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return Form(_listed([*arguments]))
    if (origin or hint) in _ARRAYS:
        items = [form_of(each) for each in arguments if each is not ...]
        return _array(
            _ARRAYS[origin or hint], items, is_fixed=origin is tuple and arguments != () and ... not in arguments
        )
    if (origin or hint) in _OBJECTS:
        return _mapping(*map(form_of, arguments or (str, Any)))
    if inspect.isclass(hint):
        return _form_of_class(hint)
    raise LookupError(hint)


def _form_of_class(cls: type[Any]) -> Form:
    if issubclass(cls, Enum) and len(cls):
        return Form(_listed([member.value for member in cls]), make=cls)
    if callable(getattr(cls, "model_json_schema", None)):  # pydantic
        return Form(cls.model_json_schema(), make=cls.model_validate)
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
        if not required <= given.keys() <= forms.keys():
            fields = [name if name in required else f"{name} (optional)" for name in forms]
            raise ValueError(f"expected the fields {', '.join(fields)}, got {', '.join(given) or 'none':.200}")
        return make(**{name: forms[name].value(value, name) for name, value in given.items()})

    return Form(schema, make=read)


def _mapping(names: Form, values: Form) -> Form:
    if names.kinds - {"string"}:  # JSON has text only
        raise LookupError(names)
    named = {"propertyNames": names.schema} if len(names.schema) > 1 else {}

    def read(given: Mapping[str, Any]) -> dict[Any, Any]:
        return {names.value(name, "a key"): values.value(each, f"{name:.80}") for name, each in given.items()}

    return Form({"type": "object", **named, "additionalProperties": values.schema}, make=read)


def _array(make: Callable[[Any], Any], items: Sequence[Form], *, is_fixed: bool) -> Form:
    schema: dict[str, Any] = {"items": items[0].schema} if items else {}
    if is_fixed:
        schema = {"prefixItems": [item.schema for item in items]}

    def read(given: list[Any]) -> Any:
        if is_fixed and len(given) != len(items):
            raise ValueError(f"expected {len(items)} items, got {len(given)}")
        pairs = zip(itertools.cycle(items or [Form({})]), given, strict=False)
        return make(item.value(each, f"item {place}") for place, (item, each) in enumerate(pairs))

    return Form({"type": "array", **schema}, make=read)


def _union(arguments: tuple[Any, ...]) -> Form:
    ways = [form_of(each) for each in arguments if each is not type(None)]
    types_only = all(way.schema.keys() == {"type"} and isinstance(way.schema["type"], str) for way in ways)
    schema: dict[str, Any] = {"anyOf": [way.schema for way in ways]}
    if len(ways) == 1:
        schema = {**ways[0].schema}
    elif types_only:
        names = sorted({way.schema["type"] for way in ways})
        schema = {"type": names if len(names) > 1 else names[0]}
    if type(None) in arguments:
        schema["nullable"] = True

    def read(given: Any) -> Any:
        if given is None and type(None) in arguments:
            return None
        problems = []
        for way in ways:
            try:
                return way.value(given, "it")
            except ValueError as error:
                problems.append(str(error).removeprefix("it: "))
        raise ValueError(" or ".join(problems))

    return Form(schema, make=None if types_only and not any(way.make for way in ways) else read)


def _listed(values: list[Any]) -> dict[str, Any]:
    """Return the schema of some JSON values; raise LookupError for others."""
    names = [KINDS[type(value)][0] for value in values]
    if "array" in names or "object" in names:
        raise LookupError(values)
    kinds = list(dict.fromkeys(names))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
