"""Parse flags into frozen configs with tyro, with each error in one line; choose subcommands; print JSON."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import parse_json_object
from agentenv.errors import ConfigError
from agentenv.runs.flat_config import ALIASES, FlatConfig, flag_fields, flag_message

try:  # private in tyro, which has no public way to read an error. Without it tyro prints the error itself and exits.
    from tyro._errors import on_parse_error
except ImportError:
    on_parse_error = contextlib.nullcontext  # type: ignore[assignment]

T = TypeVar("T")
Commands = Mapping[str, tuple[object, Callable[[Sequence[str]], int]]]
"""Commands: what has their docstring, and the function that runs them with the words after their name."""

_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
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


def parse(config: type[T], name: str, args: Sequence[str], default: T | None = None) -> T:
    """Return the config that the flags of `agentenv NAME` describe; flags that are left out are those of `default`.

    Raises:
        ConfigError: a flag is unknown or has a wrong value.
    """

    def refuse(event: Any) -> None:
        raise ConfigError(_message(event, config, name, args))

    # Flags that have another name get their field's.
    names: dict[str, str] = {}
    words: list[str] = []
    for arg in args:
        dashed, equals, value = arg.partition("=")
        flag = dashed.removeprefix("--").replace("-", "_")
        field = ALIASES.get(flag, flag)
        if arg.startswith("--") and names.setdefault(field, flag) != flag:
            raise ConfigError(
                f"--{flag}: expected one name, got --{names[field]} as well, which means the same. Leave one out."
            )
        words.append(f"--{field}{equals}{value}" if arg.startswith("--") and flag in ALIASES else arg)
    if "-h" in words and issubclass(config, FlatConfig) and config.FIRST_FLAGS:
        sys.stdout.write(short_help(config, name))
        raise SystemExit(0)
    words = ["--help" if word.replace("_", "-") == "--help-all" else word for word in words]
    if "-h" in words or "--help" in words:
        _fill_help(config)
    more: dict[str, Any] = {} if default is None else {"default": default}
    with on_parse_error(refuse):
        parsed: T = tyro.cli(
            config,
            prog=f"agentenv {name}",
            args=words,
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes,),
            registry=_REGISTRY,
            **more,
        )
    return parsed


def _fill_help(config: type[Any]) -> None:
    """Set the docstrings of fields as their help. tyro's own reading of them breaks the text at each source line."""
    texts, hints = field_texts(config), get_type_hints(config)
    for field in fields(config):
        if text := texts.get(field.name):
            field.metadata = MappingProxyType({**field.metadata, "help": text})
        if is_dataclass(hints[field.name]):
            _fill_help(hints[field.name])


def short_help(config: type[FlatConfig], name: str) -> str:
    """Return the help of `-h`: the flags of a first run, in groups, each with the first sentence of its docstring."""
    lines = [f"usage: agentenv {name} [flags]", "", (config.__doc__ or "").splitlines()[0]]
    flags = flag_fields(config)
    hints = get_type_hints(config)
    for title, names in config.FIRST_FLAGS.items():
        lines += ["", f"{title}:"]
        for each in names:
            group = flags[each][0]
            text = field_texts(hints[group] if group else config)[each]
            first = re.split(r"(?<=\.) ", text, maxsplit=1)[0]
            lines.append(f"  --{each:20} {first}")
    lines += ["", f"`agentenv {name} --help` shows all {len(flags)} flags with their defaults."]
    return "\n".join(lines) + "\n"


def field_texts(config: type[Any]) -> dict[str, str]:
    """Return the docstrings under the fields of a class and of its bases, by the name of the field."""
    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef)), [])
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                texts[node.target.id] = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    texts[node.target.id] = " ".join(str(after.value.value).split())
    return texts


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
        near = next(iter(difflib.get_close_matches(slip, flag_fields(config), n=1)), None)
        if name == "run":
            from agentenv.training.flags import FLAT, RUN_NAMES

            near = ({theirs: ours for ours, theirs in RUN_NAMES.items()} | FLAT).get(slip, near)
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


def subcommand(prog: str, commands: Commands, args: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """Return the command that the first word names; None after printing the help, which is each name with a line.

    tyro's own subcommands would import every command, and its libraries, before one is chosen.

    Raises:
        ConfigError: the word names no command.
    """
    name = args[0] if args else "--help"
    if name in ("-h", "--help", "--help-all"):
        lines = [f"usage: {prog} COMMAND [flags]        {prog} COMMAND --help for the flags", ""]
        lines += [
            f"  {each:8} {(described.__doc__ or '').splitlines()[0]}" for each, (described, _) in commands.items()
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        return None
    if name not in commands:
        advice = did_you_mean(name, commands, f"Run `{prog} --help`.")
        raise ConfigError(f"{prog}: expected one of {', '.join(commands)}, got {name!r}.{advice}")
    return commands[name][1]


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
