"""Whether what came back is what was expected: strict types for values, bytes, lines, tokens or floats for texts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agentenv.errors import ConfigError

TextMode = Literal["exact", "lines", "tokens", "floats"]
"""`exact`: every character. `lines`: white space at the end of lines and of the text aside. `tokens`: by white space.
`floats`: tokens, of which numbers are equal within a tolerance. White space is ASCII's only."""

_BLANK = " \t\r\v\f"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_MAX_NUMBER = 400


@dataclass(frozen=True, slots=True)
class Comparison:
    """How equal two values must be. By default types count: 1, 1.0 and True are three values."""

    rel_tol: float = 0.0
    abs_tol: float = 0.0
    """With a tolerance, as in `math.isclose`, an int may stand for a float and the reverse; a bool never."""
    int_as_float: bool = False
    """1 equals 1.0, without a tolerance too."""
    tuple_as_list: bool = False
    """(1, 2) equals [1, 2], for expectations that were stored as JSON."""
    nan_equal: bool = True
    """NaN equals NaN where NaN is expected; it never equals anything else."""
    signed_zero: bool = False
    """-0.0 does not equal 0.0."""

    def __post_init__(self) -> None:
        for name in ("rel_tol", "abs_tol"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ConfigError(f"Comparison.{name}: expected a finite number from 0 on, got {value!r}. Correct it.")

    @property
    def tolerant(self) -> bool:
        """Whether it has a tolerance."""
        return self.rel_tol > 0 or self.abs_tol > 0


EXACT = Comparison()


def same_value(expected: Any, got: Any, how: Comparison = EXACT) -> bool:
    """Whether `got`, made of built-in values only, is the value that was expected.

    The keys of dicts come in any order. Members of sets and keys of dicts are compared without a tolerance.
    """
    if _numeric(expected) and _numeric(got):
        return _same_number(expected, got, how)
    if how.tuple_as_list and isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        return _same_items(expected, got, how)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, (list, tuple)):
        return _same_items(expected, got, how)
    if isinstance(expected, dict):
        theirs = {_typed(key, how): item for key, item in got.items()}
        ours = {_typed(key, how): item for key, item in expected.items()}
        return theirs.keys() == ours.keys() and all(same_value(item, theirs[key], how) for key, item in ours.items())
    if isinstance(expected, (set, frozenset)):
        return {_typed(item, how) for item in expected} == {_typed(item, how) for item in got}
    if isinstance(expected, complex):
        return _same_number(expected.real, got.real, how) and _same_number(expected.imag, got.imag, how)
    return bool(expected == got)


def _numeric(value: Any) -> bool:
    return type(value) in (int, float)


def _same_items(expected: Any, got: Any, how: Comparison) -> bool:
    return len(expected) == len(got) and all(same_value(a, b, how) for a, b in zip(expected, got, strict=True))


def _same_number(expected: float, got: float, how: Comparison) -> bool:
    if type(expected) is not type(got) and not (how.tolerant or how.int_as_float):
        return False
    if expected != expected or got != got:
        return how.nan_equal and expected != expected and got != got
    if how.signed_zero and expected == 0 == got and type(expected) is float is type(got):
        return math.copysign(1, expected) == math.copysign(1, got)
    if expected == got:
        return True
    try:
        return how.tolerant and math.isclose(expected, got, rel_tol=how.rel_tol, abs_tol=how.abs_tol)
    except OverflowError:  # an int beyond the floats
        return False


def _typed(value: Any, how: Comparison) -> Any:
    """A hashable stand-in for a hashable value, in which the types of its parts count as in `same_value`."""
    if isinstance(value, float):
        if value != value:
            return (float, "nan") if how.nan_equal else object()
        if how.int_as_float and value.is_integer():
            return (int, int(value))
        return (float, value, math.copysign(1, value) if how.signed_zero else None)
    if isinstance(value, complex):
        return (complex, _typed(value.real, how), _typed(value.imag, how))
    if isinstance(value, tuple):
        return (tuple, tuple(_typed(item, how) for item in value))
    if isinstance(value, frozenset):
        return (frozenset, frozenset(_typed(item, how) for item in value))
    return (type(value), value)


def same_text(expected: str, got: str, mode: TextMode, how: Comparison = EXACT) -> bool:
    """Whether an output is the expected one, by `mode`; `how` gives the tolerance of `floats`."""
    if mode == "exact":
        return expected == got
    if mode == "lines":
        return _lines(expected) == _lines(got)
    ours, theirs = _tokens(expected), _tokens(got)
    if mode == "tokens":
        return ours == theirs
    return len(ours) == len(theirs) and all(_same_token(a, b, how) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip(_BLANK) for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _tokens(text: str) -> list[str]:
    return [token for token in re.split(r"[ \t\r\n\v\f]+", text) if token]


def _same_token(expected: str, got: str, how: Comparison) -> bool:
    if expected == got:
        return True
    if max(len(expected), len(got)) > _MAX_NUMBER or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(got)):
        return False
    return math.isclose(float(expected), float(got), rel_tol=how.rel_tol, abs_tol=how.abs_tol)


Checker = Callable[[Any, Any, Any], bool]
"""A judge of its own: (input, expected, got) to whether it is right. It runs outside, on a hostile `got`."""
