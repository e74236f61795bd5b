"""The help of a command, and the table of its flags that the help, the reference and shell completion are made from."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from agentenv.runs.flat_config import FlatConfig

CONFIG_FLAG = "config"
"""The flag of every FlatConfig that names a file with flags; it is not a field, because a config is not a setting."""
CONFIG_TEXT = (
    "Read flags from this YAML, TOML or JSON file; the config.json of a run is one. Flags of the command line override "
    "those of the file. `agentenv config` writes such a file."
)
_CHOICES_COLUMNS = 24
"""Longer lists of choices stand in the text of a flag."""


POSITIONAL = "positional"
"""Marks a field whose value is given without a flag: `Annotated[str, POSITIONAL]`."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command, as its config class declares it."""

    name: str
    kind: Any
    """The type of its values."""
    default: Any
    """MISSING if the flag is required."""
    text: str
    section: str = ""
    """Title of the flags among which it is shown."""
    is_positional: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a Literal allows, () for other types."""
        for kind in (self.kind, *get_args(self.kind)):
            if get_origin(kind) is Literal:
                return tuple(map(str, get_args(kind)))
        return ()

    @property
    def usage(self) -> str:
        """The flag with a word for its value, as in `--n INT`."""
        if self.is_positional:
            return self.name.upper()
        if self.kind is bool:
            return f"--{self.name}, --no_{self.name}" if self.default is True else f"--{self.name}"
        choices = "|".join(self.choices)
        return f"--{self.name} {choices if 0 < len(choices) <= _CHOICES_COLUMNS else _metavar(self.kind)}"


def flags_of(config: type[Any], defaults: Any = None, section: str = "") -> Iterator[Flag]:
    """Yield the flags of a config class; those of a nested config, with its `defaults`, follow in its place."""
    texts, hints = field_texts(config), get_type_hints(config, include_extras=True)
    sections: Mapping[str, str] = getattr(config, "SECTIONS", {})
    for field in fields(config):
        hint, text = hints[field.name], texts.get(field.name, "")
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        kind = get_args(hint)[0] if marks else hint
        if is_dataclass(kind) and isinstance(kind, type):
            assert field.default_factory is not MISSING
            yield from flags_of(kind, field.default_factory(), re.split(r"[.(]", text)[0].strip())
            continue
        section = sections.get(field.name, section)
        if not field.init:
            continue
        default = getattr(defaults, field.name, field.default)
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        yield Flag(field.name, kind, default, text, section, POSITIONAL in marks)


def positionals(config: type[Any]) -> list[str]:
    """Return the fields of a config class whose values are given without a flag, in their order."""
    hints = get_type_hints(config, include_extras=True)
    return [field.name for field in fields(config) if POSITIONAL in get_args(hints[field.name])]


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


def other_names(config: type[Any]) -> dict[str, list[str]]:
    """Return the other names of each flag that has some."""
    names: dict[str, list[str]] = {}
    for other, name in getattr(config, "ALIASES", {}).items():
        names.setdefault(name, []).append(other)
    return names


def help_text(config: type[Any], name: str, *, is_short: bool = False) -> str:
    """Return the help of a command: all flags by section, or with `is_short` those of a first run, a sentence each."""
    flags = {flag.name: flag for flag in flags_of(config)}
    columns = max(60, shutil.get_terminal_size().columns)
    words = [flag.usage for flag in flags.values() if flag.is_positional]
    lines = [f"usage: agentenv {' '.join([name, *words])} [flags]", ""]
    lines += textwrap.wrap(inspect.cleandoc(config.__doc__ or ""), columns)
    rows: dict[str, list[tuple[str, str]]] = {}
    if is_short:
        for title, names in config.FIRST_FLAGS.items():
            sentences = [re.split(r"(?<=\.) ", flags[each].text, maxsplit=1)[0] for each in names]
            rows[title] = [(f"--{each}", sentence) for each, sentence in zip(names, sentences, strict=True)]
    else:
        others = other_names(config)
        for flag in flags.values():
            rows.setdefault(flag.section or "Flags", []).append((flag.usage, _entry(flag, others.get(flag.name, ()))))
        if issubclass(config, FlatConfig):
            rows["More"] = [(f"--{CONFIG_FLAG} FILE", CONFIG_TEXT), ("-h", "Show the flags of a first run.")]
    wrapper = textwrap.TextWrapper(columns, subsequent_indent=" " * 30, break_long_words=False, break_on_hyphens=False)
    for title, entries in rows.items():
        lines += ["", *textwrap.wrap(f"{title}:", columns)]
        for usage, text in entries:
            wrapper.initial_indent = f"  {usage:27} "
            lines += wrapper.wrap(text or " ") or [f"  {usage}"]
    if is_short:
        lines += ["", f"`agentenv {name} --help` shows all {len(flags)} flags with their defaults."]
    elif any("." in other for other in getattr(config, "ALIASES", ())):
        lines += ["", "OpenRLHF's dotted names, such as --actor.adam.lr, are accepted too."]
    return "\n".join(lines) + "\n"


def _entry(flag: Flag, others: Sequence[str]) -> str:
    """Return the text of a flag in the help: its docstring, choices, other names and default."""
    flat = [f"--{other}" for other in others if "." not in other]
    parts = [
        flag.text,
        "" if "|".join(flag.choices) in flag.usage else f"One of {', '.join(flag.choices)}.",
        f"Also {', '.join(flat)}." if flat else "",
    ]
    value = flag.default
    if value is MISSING:
        parts.append("Required.")
    elif flag.kind is bool:
        parts.append("(default: on)" if value else "")
    elif value not in (None, "", (), {}):
        value = json.dumps(dict(value)) if isinstance(value, Mapping) else value
        parts.append(f"(default: {' '.join(map(str, value)) if isinstance(value, tuple | list) else value})")
    return " ".join(filter(None, parts))


def without_none(kind: Any) -> Any:
    """Return a type without None."""
    is_union = get_origin(kind) in (Union, UnionType)
    return next(each for each in get_args(kind) if each is not NoneType) if is_union else kind


def _metavar(kind: Any) -> str:
    kind = without_none(kind)
    origin = get_origin(kind)
    if origin is Mapping:
        return "JSON"
    if origin in (tuple, list):
        inner = [each for each in get_args(kind) if each is not Ellipsis]
        return " ".join(map(_metavar, inner)) + (" ..." if is_repeatable(kind) else "")
    return {int: "INT", float: "NUMBER"}.get(kind, "WORD" if origin is Literal else "TEXT")


def is_repeatable(kind: Any) -> bool:
    """Return True if a flag of this type takes any number of values: a tuple without a fixed length, or a list."""
    one = without_none(kind)
    return get_origin(one) is list or (get_origin(one) is tuple and get_args(one)[-1:] == (Ellipsis,))
