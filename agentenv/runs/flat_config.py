"""FlatConfig: a config of nested groups whose flags, JSON and keyword arguments stay flat."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import parse_json_object
from agentenv.errors import ConfigError

_SCALARS = {bool: "True or False", int: "an integer", float: "a number", str: "text"}


@dataclass(frozen=True)
class FlatConfig:
    """A frozen config. A field whose type is a dataclass is a group; its fields are flags like the config's own.

    `config.limits.max_turns` is the flag `--max_turns` and the key `max_turns` of config.json.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other names of flags, and the field that each stands for."""
    BARE: ClassVar[Mapping[str, str]] = {}
    """Flags that may be given without a value, and the value that they then have."""
    FIRST_FLAGS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The flags of a first run, which `-h` shows, in groups. Without any, `-h` shows all flags."""
    SECTIONS: ClassVar[Mapping[str, str]] = {}
    """Titles in the help, each by the field above which it stands. Flags of a group stand under its docstring."""
    REPEATABLE: ClassVar[tuple[str, ...]] = ()
    """Flags that may be given several times: tuples of texts. In JSON one text is itself, and none is null; an entry
    that is a JSON object is an object there."""

    @classmethod
    def from_flags(cls, **flags: Any) -> Self:
        """Return the config with these flags, by their flat names; all others keep their defaults.

        Lists become tuples where the field is a tuple, and JSON text becomes an object where the field is a mapping.
        A flag of `REPEATABLE` may be one value, a list or None.

        Raises:
            ConfigError: a flag is unknown, or has a wrong value.
        """
        made: Self = with_values(cls, None, flags)
        return made

    def with_flags(self, **flags: Any) -> Self:
        """Return a copy with these flags changed.

        Raises:
            ConfigError: a flag is unknown, or has a wrong value.
        """
        made: Self = with_values(type(self), self, flags)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return every flag and its value under flat keys, as `config.json` holds them."""
        values = {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in self.flags().items()
        }
        for name in self.REPEATABLE:
            given = [json.loads(text) if text.startswith("{") else text for text in values[name]]
            values[name] = given if len(given) > 1 else given[0] if given else None
        return values

    def flags(self) -> dict[str, Any]:
        """Return every flag and its value, by the flat names."""
        return flag_values(self)


def flag_values(config: Any) -> dict[str, Any]:
    """Return every flag of a config dataclass and its value, by the flat names."""
    known = flag_fields(type(config))
    return {name: getattr(getattr(config, group) if group else config, name) for name, (group, _) in known.items()}


def flag_fields(config: type[Any]) -> dict[str, tuple[str, Any]]:
    """Return each flag of a config dataclass with the field of its group ("" at the top level) and its type.

    A field without an argument of the constructor is not a flag.
    """
    flags: dict[str, tuple[str, Any]] = {}
    hints = get_type_hints(config)
    for field in fields(config):
        kind = hints[field.name]
        if is_dataclass(kind) and isinstance(kind, type):
            flags |= {name: (field.name, inner) for name, (_, inner) in flag_fields(kind).items()}
        elif field.init:
            flags[field.name] = ("", kind)
    return flags


def with_values(cls: Any, base: Any, flags: Mapping[str, Any]) -> Any:
    """Return a config dataclass with these flags, by their flat names; all others are those of `base`, or defaults.

    Raises:
        ConfigError: a flag is unknown, or has a wrong value.
    """
    known, aliases = flag_fields(cls), getattr(cls, "ALIASES", {})
    top: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for given, value in flags.items():
        name = aliases.get(given, given)
        if name not in known:
            raise ConfigError(
                f"{given}: expected a flag's name."
                + did_you_mean(given, known, "`agentenv run --help` and `agentenv train --help` list them.")
            )
        if name != given and name in flags:
            raise ConfigError(f"{given}: expected one name, got {name} as well, which means the same. Leave one out.")
        group, kind = known[name]
        value = _converted(name, kind, value, repeatable=name in getattr(cls, "REPEATABLE", ()))
        (groups.setdefault(group, {}) if group else top)[name] = value
    try:
        for field in fields(cls):
            if changes := groups.get(field.name):
                assert field.default_factory is not MISSING
                group = getattr(base, field.name) if base else field.default_factory()
                top[field.name] = replace(group, **changes)
        return replace(base, **top) if base else cls(**top)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(flag_message(str(error))) from error


def _converted(name: str, kind: Any, value: Any, *, repeatable: bool) -> Any:
    """Return a value as the field has it.

    Raises:
        ConfigError: it is a text, a number or a list where the field has another type, or none of the field's names.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    kinds = {get_origin(each) or each for each in (kind, *get_args(kind))}
    if repeatable:
        texts = [] if value is None else value if isinstance(value, list | tuple) else [value]
        for each in texts:
            for part in each.values() if isinstance(each, Mapping) else [each]:
                if isinstance(part, type):
                    raise ConfigError(
                        f"--{name}: expected text, got {brief(part)}. Write a class as FILE.py:Name or module:Name."
                    )
            if not isinstance(each, str | os.PathLike | Mapping):
                raise ConfigError(f"--{name}: expected text, got {brief(each)}.")
        try:
            return tuple(
                json.dumps(dict(each), default=os.fspath) if isinstance(each, Mapping) else os.fspath(each)
                for each in texts
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--{name}: expected values that JSON has, got another: {error}.") from error
    if isinstance(value, str) and Mapping in kinds:
        return parse_json_object(f"--{name}", value)
    if isinstance(value, list) and tuple in kinds:
        return tuple(value)
    names = get_args(next((each for each in (kind, *get_args(kind)) if get_origin(each) is Literal), None))
    if names and value not in names and not (value is None and NoneType in kinds):
        raise ConfigError(f"--{name}: expected one of {', '.join(names)}, got {brief(value)}.")
    is_scalar = kinds.intersection(_SCALARS) and kinds <= {*_SCALARS, NoneType, UnionType}
    if is_scalar and isinstance(value, str | Real | list | tuple | NoneType) and not _is_one_of(value, kinds):
        expected = " or ".join(text for each, text in _SCALARS.items() if each in kinds)
        raise ConfigError(f"--{name}: expected {expected}, got {brief(value)}.")
    return value


def _is_one_of(value: Any, kinds: Collection[Any]) -> bool:
    """Return True if a value has one of these types; an integer, also numpy's, is a float too."""
    if value is None or isinstance(value, bool | str):
        return type(value) in kinds
    return isinstance(value, Real if float in kinds else Integral if int in kinds else ())


def flag_message(message: str) -> str:
    """Return a message about a field of a group, such as `Limits.max_turns: …`, with the flag's name instead."""
    return re.sub(r"^[A-Z]\w+\.(\w+):", r"--\1:", message)
