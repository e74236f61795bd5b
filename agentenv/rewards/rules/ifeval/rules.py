"""Define a rule: a check of a text, and the kinds of its parameters, which are validated here."""

from __future__ import annotations

import ast
import contextlib
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv._util.syntax import parse_source
from agentenv.rewards.rules.ifeval.counts import RELATIONS
from agentenv.rewards.rules.ifeval.language import CODES, code_of

_MAX_COUNT = 1_000_000
_SEPARATORS = ("\n", "|", ";", ",", "/")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of parameter: `read` returns its value as plain JSON, or None if it is not as `expected` says."""

    expected: str
    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of instruction: `check(text, **parameters)` returns True if a text follows it."""

    type: str
    """The instruction id under which it is reported, such as `keywords:existence`."""
    check: Callable[..., bool]
    params: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    detects: bool = False
    """True if it may detect a language, which is slow and needs an optional package."""


def items_of(value: object) -> list[Any] | None:
    """Return the members of a list, tuple or array; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value  # an array may have no dimension
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return list(value)
    return None


def _whole(low: int) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        # Tables turn whole numbers beside missing ones into floats.
        whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
        if not whole or isinstance(value, bool) or not low <= value <= _MAX_COUNT:
            return None
        return int(value)

    return read


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _letter(value: Any) -> str | None:
    text = _text(value)
    return text.strip() if text is not None and len(text.strip()) == 1 else None


def _texts(value: Any) -> list[str] | None:
    members = items_of(value)
    return members if members and all(_text(member) is not None for member in members) else None


def _relation(value: Any) -> str | None:
    return value if isinstance(value, str) and value in RELATIONS else None


def _options(value: Any) -> list[str] | None:
    """Return a list, from a list, its Python source, or a text with its members between separators."""
    if not isinstance(value, str):
        return _texts(value)
    if value.lstrip()[:1] in ("[", "("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return _texts(ast.literal_eval(parse_source(value.strip(), "eval")))
    separator = next((separator for separator in _SEPARATORS if separator in value), "\n")
    return _texts([option.strip() for option in value.split(separator) if option.strip()])


COUNT = Kind(f"a whole number of 0..{_MAX_COUNT}", _whole(0))
PLACE = Kind(f"a whole number of 1..{_MAX_COUNT}", _whole(1))
TEXT = Kind("a text that is not blank", _text)
LETTER = Kind("a single character", _letter)
TEXTS = Kind("a list of texts that are not blank, at least one", _texts)
OPTIONS = Kind("a list of texts, or a text that holds one", _options)
RELATION = Kind(f"one of {', '.join(RELATIONS)}", _relation)
LANGUAGE = Kind(f"the code of a language ({', '.join(CODES)})", code_of)
