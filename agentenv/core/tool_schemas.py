"""What the JSON schema of a tool says of its parameters, also by `$ref`, `allOf`, `anyOf` and `oneOf`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast
from urllib.parse import unquote

from agentenv._util.lenient_json import LiteralError, read_whole_literal

_MAX_PARTS, _MAX_LEVELS = 4096, 32
"""Schemas that are read for all parameters of a tool, in 0.02 s, and how deep; a schema may refer to itself."""
_MAX_SHOWN = 50
"""Choices that an error names."""
KINDS: Mapping[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), type(None): ("null",),
    list: ("array",), dict: ("object",),
}  # fmt: skip
"""JSON's names for the types of values, the first one for the type itself."""
_NULLS = ("null", "None")
_INNER = (("array", "prefixItems", "items"), ("object", "properties", "additionalProperties"))
"""The type of a value, and where its schema names what is in it and all else: by position, or by name."""
T = TypeVar("T")
_ANY: Mapping[str, Any] = {}
"""The schema of what no schema names; other schemas may be equal to it."""


@dataclass(frozen=True)
class Parameter:
    """The schema of one parameter, of a value in it, or of all parameters."""

    schema: Any
    root: Any = None
    """The schema of all, to which it may refer; None: it is that one."""
    known: _Reading | None = field(default=None, compare=False, repr=False)
    """What was read of the schema of all before."""

    @cached_property
    def kinds(self) -> set[str]:
        """The types that it allows, "integer" beside "number"; empty if it names none."""
        return self._reading.kinds(self.schema) or set()

    @cached_property
    def values(self) -> Sequence[Any] | None:
        """The only values that it allows; None if it does not list them."""
        return self._reading.values(self.schema)

    def at(self, key: str | int) -> Parameter:
        """Return the schema of a property or an item: {} if none is named at all, None if only others are."""
        return self.beside(self._reading.inner(self.schema, key))

    def beside(self, schema: Any) -> Parameter:
        """Return a schema that refers to the same one."""
        return Parameter(schema, self._reading.root, self._reading)

    def checked(self, value: Any, where: str) -> Any:
        """Return a value of the types and choices that it allows, a whole float as an integer if it must be one.

        Raises:
            ValueError: it is of another type, or not among the choices; the message begins with `where`.
        """
        kinds, choices = self.kinds, self.values
        if value is None and "null" in kinds:
            return None
        if choices is not None and value not in choices:
            shown = ", ".join(map(repr, choices[:_MAX_SHOWN])) + ", …" * (len(choices) > _MAX_SHOWN)
            raise ValueError(f"{where} must be one of {shown}, got {value!r:.80}")
        if kinds and not kinds & _kinds_of(value):
            shown = " or ".join(sorted(kinds - {"integer"} if "number" in kinds else kinds))
            raise ValueError(f"{where} must be of type {shown}, got {value!r:.80}")
        return int(value) if isinstance(value, float) and "integer" in kinds and "number" not in kinds else value

    @cached_property
    def _reading(self) -> _Reading:
        return self.known or _Reading(self.schema if self.root is None else self.root)

    @property
    def takes_null(self) -> bool:
        """True if it allows null, or any type."""
        return isinstance(self.schema, Mapping) and (not self.kinds or "null" in self.kinds)

    def read(self, text: str) -> Any:
        """Return the value that is written without quotes as `text`."""
        kinds = self.kinds
        values = self.values if "string" in kinds and kinds - {"string", "null"} else None
        if "string" in kinds and (values is None or text in values) and not ("null" in kinds and text in _NULLS):
            return text
        try:
            literal = read_whole_literal(text)
        except LiteralError:
            return text
        return literal if values is None or literal in values else text


def _once(find: Callable[..., T]) -> Callable[..., T]:
    """Return a method that reads each schema once; it returns None while it reads."""

    def found(self: _Reading, schema: Any, *args: Any, level: int = 0) -> T:
        asked = (find.__name__, id(schema), *args)
        if asked not in self.known:
            self.known[asked] = schema, None
            self.known[asked] = schema, find(self, schema, *args, level=level)
        return cast(T, self.known[asked][1])

    return found


class _Reading:
    """One reading of a schema, each part once; what is too deep or too much counts as a schema that allows all."""

    def __init__(self, root: Any) -> None:
        self.root, self.num_left = root, _MAX_PARTS
        self.known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        """What was asked, with the place of a schema: that schema, and the answer."""

    def parts(self, schema: Any, level: int = 0, seen: set[int] | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas that hold together, each once: the schema, what it refers to, and `allOf`."""
        seen = set() if seen is None else seen
        if not isinstance(schema, Mapping) or self.num_left <= 0 or level > _MAX_LEVELS or id(schema) in seen:
            return
        self.num_left -= 1
        seen.add(id(schema))
        yield schema
        if isinstance(schema.get("$ref"), str):
            ref, target = schema["$ref"], self.root
            for key in ref.split("/")[1:] if ref == "#" or ref.startswith("#/") else ["?"]:
                key = unquote(key).replace("~1", "/").replace("~0", "~")
                target = {str(place): each for place, each in enumerate(target)} if isinstance(target, list) else target
                target = target.get(key) if isinstance(target, Mapping) else None
            yield from self.parts(target, level + 1, seen)
        for part in _listed(schema, "allOf"):
            yield from self.parts(part, level + 1, seen)

    @_once
    def kinds(self, schema: Any, *, level: int) -> set[str] | None:
        """Return the types that a schema allows; None for all."""
        found: set[str] | None = None
        nullable = False
        for part in self.parts(schema, level):
            nullable = nullable or part.get("nullable") is True
            named, own = part.get("type"), []
            if types := {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}:
                own.append(types | {"integer"} if "number" in types else types)
            if (values := _own_values(part)) is not None:
                own.append({kind for value in values for kind in _kinds_of(value)})
            for key in ("anyOf", "oneOf"):
                ways = [self.kinds(way, level=level + 1) for way in _listed(part, key)]
                if ways and None not in ways:
                    own.append(set[str]().union(*(way for way in ways if way)))
            for kinds in own:
                found = kinds if found is None else found & kinds
        return found | {"null"} if found and nullable else found

    @_once
    def values(self, schema: Any, *, level: int) -> list[Any] | None:
        """Return the only values that a schema allows; None if it does not list them."""
        found: list[Any] | None = None
        for part in self.parts(schema, level):
            listed = [_own_values(part)]
            for key in ("anyOf", "oneOf"):
                ways = [self.values(way, level=level + 1) for way in _listed(part, key)]
                listed.append([each for way in ways for each in way or ()] if ways and None not in ways else None)
            for values in listed:
                if values is not None and found is not None:
                    self.num_left -= len(found) * len(values) // 64
                    values = [value for value in found if value in values] if self.num_left > 0 else found
                found = found if values is None else values
        return found

    @_once
    def inner(self, schema: Any, key: str | int, *, level: int) -> Any:
        """Return the schema of a property or an item; _ANY if none is named at all, None if only others are."""
        kind, named, others = _INNER[isinstance(key, str)]
        found: list[Any] = []
        is_open = schema is not None
        for part in self.parts(schema, level):
            own = part.get(named)
            own = dict(enumerate(own)) if isinstance(own, list) else own
            is_open = is_open and not isinstance(own, Mapping)
            found.append(own[key] if isinstance(own, Mapping) and key in own else part.get(others))
            for ways in (_listed(part, "anyOf"), _listed(part, "oneOf")):
                fitting = [way for way in ways if kind in (self.kinds(way, level=level + 1) or {kind})]
                inner = [self.inner(way, key, level=level + 1) for way in fitting]
                if inner and all(each is not _ANY for each in inner):
                    is_open, said = False, [each for each in inner if each is not None]
                    found.append({"anyOf": said} if said else None)
        found = [each for each in found if each is not None and each is not False]
        if len(found) > 1:
            return {"allOf": found}
        return found[0] if found else _ANY if is_open else None


def _kinds_of(value: Any) -> set[str]:
    """Return JSON's names for the type of a value; a whole float is an integer too."""
    found = {kind for cls in type(value).__mro__ for kind in KINDS.get(cls, ())}
    if isinstance(value, bool):
        return {"boolean"}
    return found | {"integer"} if isinstance(value, float) and value.is_integer() else found


def _own_values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
