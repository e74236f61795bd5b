"""Parse flags, and files of flags, into frozen configs with tyro, with each error in one line."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import tyro

from agentenv.cli.help import CONFIG_FLAG, help_text, is_repeatable
from agentenv.core.arguments import parse_json_object
from agentenv.errors import ConfigError
from agentenv.runs.flat_config import FlatConfig, flag_fields, flag_message

if TYPE_CHECKING:
    from agentenv.runs.config_file import Given

try:  # private in tyro, which has no public way to read an error. Without it tyro prints the error itself and exits.
    from tyro._errors import on_parse_error
except ImportError:
    on_parse_error = contextlib.nullcontext  # type: ignore[assignment]

T = TypeVar("T")
REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _json_object(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if get_origin(info.type) is not Mapping:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: parse_json_object("JSON", words[0]),
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [json.dumps(dict(value))],
    )


def parse(
    config: type[T],
    name: str,
    args: Sequence[str],
    default: T | None = None,
    *,
    translate: Callable[[list[Given]], list[Given]] = list,
) -> T:
    """Return the config that the flags of `agentenv NAME` describe; flags that are left out are those of `default`.

    `translate` replaces flags that are not fields of the config by flags that are.

    Raises:
        ConfigError: a flag is unknown, is given twice, or has a wrong value.
    """

    def refuse(event: Any) -> None:
        raise ConfigError(_message(event, config, name, words))

    args, rest = _split(args)
    if asked := next((arg for arg in args if arg == "-h" or arg.replace("_", "-") in ("--help", "--help-all")), None):
        is_short = asked == "-h" and issubclass(config, FlatConfig) and bool(config.FIRST_FLAGS)
        sys.stdout.write(help_text(config, name, is_short=is_short))
        raise SystemExit(0)
    words, given = _given(args)
    given = _canonical(config, given)
    of_file: list[Given] = []
    path = next((values for flag, values in given if flag == CONFIG_FLAG), None)
    if path is not None and issubclass(config, FlatConfig):
        if len(path) != 1:
            raise ConfigError(f"--{CONFIG_FLAG}: expected a file, got {' '.join(path) or 'none'!r}. Name one.")
        given = [each for each in given if each[0] != CONFIG_FLAG]
        known = {_field(config, flag) for flag, _ in given}
        from agentenv.runs.config_file import read_flags

        of_file = [each for each in read_flags(config, path[0]) if _field(config, each[0]) not in known]
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        for flag, values in translate([*of_file, *given]):
            flag = flag if flag.startswith("--") else f"--{flag}"
            is_dashed = len(values) == 1 and values[0].startswith("-")  # which could be taken for a flag
            words += [f"{flag}={values[0]}"] if is_dashed else [flag, *values]
        words += rest
        with on_parse_error(refuse):
            parsed: T = tyro.cli(
                config,
                prog=f"agentenv {name}",
                args=words,
                use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=REGISTRY,
                **more,
            )
    except ConfigError as error:
        if path is not None and any(f"--{flag}:" in str(error) for flag, _ in of_file):
            raise ConfigError(f"{path[0]}: {error}") from error
        raise
    return parsed


def _split(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the arguments before `--`, and `--` with those after it, which are values."""
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end:]


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


def _canonical(config: type[Any], given: Sequence[Given]) -> list[Given]:
    """Return the flags under the names of their fields, with the values of a repeated flag in one place.

    Flags that the config does not have keep the form in which they were given.

    Raises:
        ConfigError: a flag is given twice, and it takes one value, or has two names.
    """
    kinds = {name: kind for name, (_, kind) in flag_fields(config).items()}
    bare: Mapping[str, str] = getattr(config, "BARE", {})
    aliases: Mapping[str, str] = getattr(config, "ALIASES", {})
    found: dict[str, Given] = {}
    names: dict[str, str] = {}
    for flag, values in given:
        typed = flag[2:].replace("-", "_")
        name = aliases.get(typed, typed)
        field = _field(config, name)
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


def _field(config: type[Any], flag: str) -> str:
    """Return the field of a flag's name: `ray` for `no_ray`."""
    known = flag_fields(config)
    rest = flag.removeprefix("no_")
    return rest if flag not in known and rest in known and known[rest][1] is bool else flag


def _message(event: Any, config: type[Any], name: str, args: Sequence[str]) -> str:
    """Return one line about a tyro._errors.ParseErrorEvent."""
    kind, command = type(event).__name__, f"agentenv {name}"
    advice = f"Run `{command} --help` for the flags."
    unknown = getattr(event, "tokens", None) or getattr(event, "unrecognized_tokens", None)
    if unknown:  # with both, the unknown flag is the likelier reason
        flag = next((token for token in unknown if token.startswith("-")), None)
        if flag is None:
            return f"{command}: expected flags, got {unknown[0]!r}. {advice}"
        slip = flag.split("=")[0].lstrip("-").replace("-", "_")
        names = [
            *flag_fields(config),
            *getattr(config, "ALIASES", ()),
            *([CONFIG_FLAG] if issubclass(config, FlatConfig) else []),
        ]
        near = next(iter(difflib.get_close_matches(slip, names, n=1)), None)
        return f"{command}: expected one of its flags, got {flag}. {f'Did you mean --{near}?' if near else advice}"
    if kind == "MissingArgs":
        fields = [(each.arg, each.arg.field.helptext) for each in event.missing_arguments]
        texts = [(_flag(arg), (text() if callable(text) else text) or "required") for arg, text in fields]
        missing = ", ".join(f"{flag} ({' '.join(text.split()).rstrip('.')})" for flag, text in texts)
        return f"{command}: expected {missing}, got none. {advice}"
    if kind == "InstantiationFailure" and (event.argument is None or re.match(r"\S+: expected ", event.message)):
        message = flag_message(event.message)
        return message if event.argument is None else re.sub(r"\bJSON(?=: | ')", _flag(event.argument), message)
    argument = getattr(event, "argument", None)
    if argument is None:
        return f"{command}: expected other flags. {advice}"
    flag = _flag(argument)
    if kind == "InvalidChoice":
        return f"{flag}: expected one of {', '.join(event.choices)}, got {event.value!r}. Choose one of them."
    if kind == "BadValue":
        num = argument.lowered.nargs
        what, which = (f"{num} values", "all of them") if isinstance(num, int) and num > 1 else ("a value", "it")
        return f"{flag}: expected {what}, got {_words_after(flag, args)}. Add {which}."
    what = _description(argument.field.type_stripped)
    return f"{flag}: expected {what}, got {_words_after(flag, args)}. Change the value."


def _flag(argument: Any) -> str:
    name: str = argument.field.intern_name
    return name.upper() if argument.is_positional() else f"--{name}"


def _description(kind: Any) -> str:
    """Return the words for values of a type: "an integer", "2 numbers or None"."""
    kinds = [each for each in get_args(kind) or (kind,) if each not in (NoneType, Ellipsis)]
    or_none = " or None" if NoneType in get_args(kind) else ""
    if get_origin(kinds[0]) is tuple:
        kind = kinds[0]
        kinds = [each for each in get_args(kind) if each is not Ellipsis]
    if get_origin(kind) is tuple and kinds[0] in (int, float):
        return f"{len(kinds) if Ellipsis not in get_args(kind) else 'only'} numbers{or_none}"
    return {int: "an integer", float: "a number"}.get(kinds[0], "another value") + or_none


def _words_after(flag: str, args: Sequence[str]) -> str:
    """Return the words after the last occurrence of a flag, quoted; "none" if there are none."""
    words: list[str] = []
    is_value = False
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            is_value = name.replace("-", "_") == flag.replace("-", "_")
            words = ([value] if equals else []) if is_value else words
        elif is_value:
            words.append(arg)
    return repr(" ".join(words)) if words else "none"


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
