"""Parse flags, and files of flags, into frozen configs, with each error in one line."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from agentenv.cli.help import CONFIG_FLAG, field_texts, help_text, is_repeatable, positionals, without_none
from agentenv.errors import ConfigError
from agentenv.runs.flat_config import FlatConfig, flag_fields, with_values

if TYPE_CHECKING:
    from agentenv.runs.config_file import Given

T = TypeVar("T")


def parse(
    config: type[T],
    name: str,
    args: Sequence[str],
    stored: Callable[[Mapping[str, Any]], T | None] | None = None,
    *,
    translate: Callable[[list[Given]], list[Given]] = list,
) -> T:
    """Return the config that the flags of `agentenv NAME` describe.

    With --resume, flags that are left out are those of the config that `stored` returns for the others, if any.
    `translate` replaces flags that are not fields of the config by flags that are.

    Raises:
        ConfigError: a flag is unknown, is given twice, or has a wrong value.
    """
    end = args.index("--") if "--" in args else len(args)
    args, rest = args[:end], args[end + 1 :]  # behind `--` are values
    if asked := next((arg for arg in args if arg == "-h" or arg.replace("_", "-") in ("--help", "--help-all")), None):
        is_short = asked == "-h" and issubclass(config, FlatConfig) and bool(config.FIRST_FLAGS)
        sys.stdout.write(help_text(config, name, is_short=is_short))
        raise SystemExit(0)
    kinds = {name: kind for name, (_, kind) in flag_fields(config).items()}
    stray, given = _given(args)
    given = _canonical(config, kinds, given)
    of_file: list[Given] = []
    path = next((values for flag, values in given if flag == CONFIG_FLAG), None)
    if path is not None and issubclass(config, FlatConfig):
        if len(path) != 1:
            raise ConfigError(f"--{CONFIG_FLAG}: expected a file, got {' '.join(path) or 'none'!r}. Name one.")
        given = [each for each in given if each[0] != CONFIG_FLAG]
        known = {_field(kinds, flag) for flag, _ in given}
        from agentenv.runs.config_file import read_flags

        of_file = [each for each in read_flags(config, path[0]) if _field(kinds, each[0]) not in known]
    try:
        values, more = _values(config, name, kinds, translate([*of_file, *given]))
        values |= _positional_values(config, name, kinds, [*stray, *more], rest)
        base = stored(values) if stored is not None and values.get("resume") else None
        if base is None:
            _check_complete(config, name, values)
        made: T = with_values(config, base, values)
    except ConfigError as error:
        if path is not None and any(f"--{flag}:" in str(error) for flag, _ in of_file):
            raise ConfigError(f"{path[0]}: {error}") from error
        raise
    return made


def _given(args: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Return the words before the first flag, and each flag with the words after it."""
    head: list[str] = []
    given: list[Given] = []
    for arg in args:
        if arg.startswith("--"):
            flag, equals, value = arg.partition("=")
            given.append((flag, [value] if equals else []))
        else:
            (given[-1][1] if given else head).append(arg)
    return head, given


def _canonical(config: type[Any], kinds: Mapping[str, Any], given: Sequence[Given]) -> list[Given]:
    """Return the flags under the names of their fields, with the values of a repeated flag in one place.

    Flags that the config does not have keep the form in which they were given.

    Raises:
        ConfigError: a flag is given twice, and it takes one value, or has two names.
    """
    bare: Mapping[str, str] = getattr(config, "BARE", {})
    aliases: Mapping[str, str] = getattr(config, "ALIASES", {})
    found: dict[str, Given] = {}
    names: dict[str, str] = {}
    for flag, values in given:
        typed = flag[2:].replace("-", "_")
        name = aliases.get(typed, typed)
        field = _field(kinds, name)
        if field not in found:
            is_known = field in kinds or (field == CONFIG_FLAG and issubclass(config, FlatConfig))
            words = list(values) or ([bare[field]] if field in bare else [])
            found[field], names[field] = (name if is_known else flag, words), typed
        elif typed != names[field]:
            same = "one name, got --{}, which means the same" if name == found[field][0] else "one of the two, got --{}"
            raise ConfigError(f"--{typed}: expected {same.format(names[field])}. Leave one out.")
        elif is_repeatable(kinds.get(field)):
            found[field][1].extend(values)
        else:
            both = f": {' '.join(found[field][1])!r} and {' '.join(values)!r}" if values else ""
            raise ConfigError(f"--{typed}: expected it once, got it twice{both}. Leave one out.")
    for field, (_, values) in found.items():
        if not values and is_repeatable(kinds.get(field)):
            raise ConfigError(f"--{field}: expected a value, got none. Add it.")
        if values == ["None"] and is_repeatable(kinds.get(field)):
            values.clear()  # as None unsets a flag of one value
    return list(found.values())


def _field(kinds: Mapping[str, Any], flag: str) -> str:
    """Return the field of a flag's name: `ray` for `no_ray`."""
    rest = flag.removeprefix("no_")
    return rest if flag not in kinds and kinds.get(rest) is bool else flag


def _values(
    config: type[Any], command: str, kinds: Mapping[str, Any], given: Sequence[Given]
) -> tuple[dict[str, Any], list[str]]:
    """Return the value of each flag by its field, and the words that stand after the value of a flag.

    Raises:
        ConfigError: a flag is unknown, or has a wrong value.
    """
    named = [(flag.removeprefix("--"), words) for flag, words in given]
    for flag, _ in named:
        if _field(kinds, flag) not in kinds:
            raise _unknown(config, command, f"--{flag}")
    values: dict[str, Any] = {}
    stray: list[str] = []
    for flag, words in named:
        field = _field(kinds, flag)
        if kinds[field] is bool:
            values[field], num = flag == field, 0
        else:
            num = _num_words(kinds[field], len(words))
            values[field] = _read(f"--{field}", kinds[field], words[:num])
        stray += words[num:]
    return values, stray


def _positional_values(
    config: type[Any], command: str, kinds: Mapping[str, Any], words: Sequence[str], after_dashes: Sequence[str]
) -> dict[str, Any]:
    """Return the values that belong to no flag, by field, from the words before and after `--`.

    Raises:
        ConfigError: there are too many, or one is wrong.
    """
    dashed = next((word for word in words if re.match(r"-[^\W\d]", word)), None)
    if dashed is not None:
        raise _unknown(config, command, dashed)
    values: dict[str, Any] = {}
    left = [*words, *after_dashes]
    for name in positionals(config):
        if left:
            num = _num_words(kinds[name], len(left))
            values[name], left = _read(name.upper(), kinds[name], left[:num]), left[num:]
    if left:
        raise ConfigError(f"agentenv {command}: expected flags, got {left[0]!r}. {_advice(command)}")
    return values


def _check_complete(config: type[Any], command: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field without a default has no value."""
    missing = [
        each.name
        for each in fields(config)
        if each.init and each.default is MISSING and each.default_factory is MISSING and each.name not in values
    ]
    if missing:
        texts, named = field_texts(config), positionals(config)
        shown = [f"{name.upper() if name in named else f'--{name}'} ({texts[name].rstrip('.')})" for name in missing]
        raise ConfigError(f"agentenv {command}: expected {', '.join(shown)}, got none. {_advice(command)}")


def _unknown(config: type[Any], command: str, flag: str) -> ConfigError:
    """Return the error of a flag that the config does not have."""
    names = [*flag_fields(config), *getattr(config, "ALIASES", ())]
    names += [CONFIG_FLAG] if issubclass(config, FlatConfig) else []
    near = difflib.get_close_matches(flag.lstrip("-").replace("-", "_"), names, n=1)
    advice = f"Did you mean --{near[0]}?" if near else _advice(command)
    return ConfigError(f"agentenv {command}: expected one of its flags, got {flag}. {advice}")


def _advice(command: str) -> str:
    return f"Run `agentenv {command} --help` for the flags."


def _num_words(kind: Any, num_given: int) -> int:
    """Return the number of words that a value of a type takes."""
    if is_repeatable(kind):
        return num_given
    kind = without_none(kind)
    return len(get_args(kind)) if get_origin(kind) is tuple else 1


def _read(flag: str, kind: Any, words: Sequence[str]) -> Any:
    """Return the value of a flag.

    Raises:
        ConfigError: the words are not a value of the type.
    """
    if NoneType in get_args(kind) and list(words) == ["None"]:
        return None
    one = without_none(kind)
    inner = get_args(one)[0] if get_origin(one) is tuple else one
    if not is_repeatable(kind) and len(words) < _num_words(kind, 0):
        what, which = (f"{_num_words(kind, 0)} values", "all of them") if inner is not one else ("a value", "it")
        raise ConfigError(f"{flag}: expected {what}, got {_shown(words)}. Add {which}.")
    if get_origin(inner) is Literal:
        for word in words:
            if word not in get_args(inner):
                choices = ", ".join(get_args(inner))
                raise ConfigError(f"{flag}: expected one of {choices}, got {word!r}. Choose one of them.")
    try:
        found = tuple(inner(word) for word in words) if inner in (int, float) else tuple(words)
    except ValueError as error:
        num = "only" if is_repeatable(kind) else len(get_args(one))
        what = {int: "an integer", float: "a number"}.get(one, f"{num} numbers")
        what += " or None" if NoneType in get_args(kind) else ""
        raise ConfigError(f"{flag}: expected {what}, got {_shown(words)}.") from error
    return found[0] if inner is one else found


def _shown(words: Sequence[str]) -> str:
    return repr(" ".join(words)) if words else "none"


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
