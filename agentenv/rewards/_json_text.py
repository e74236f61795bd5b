"""Reads JSON that a model wrote, with none of the freedoms of Python's reader."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_CHARS = 1 << 18
MAX_DEPTH = 64
MAX_DIGITS = 300
"""A longer integer is none that a float can hold, which is what readers of JSON in other languages have."""
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


class NotJson(Exception):
    """The text is no JSON document, or one that is refused; says why."""


def read_json(text: str) -> Any:
    """The value that the whole text is.

    Raises:
        NotJson: it is none; it has a key twice in one object, NaN or an infinite number, an integer of more than
            `MAX_DIGITS` digits, more than `MAX_DEPTH` levels or more than `MAX_CHARS` characters.
    """
    if len(text) > MAX_CHARS:
        raise NotJson(f"it is longer than {MAX_CHARS} characters")
    if _depth(text) > MAX_DEPTH:
        raise NotJson(f"it has more than {MAX_DEPTH} levels")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
    except ValueError as error:
        raise NotJson(str(error)) from error


def _depth(text: str) -> int:
    """How deep the reader would recurse, at most: a string without an end is where it stops."""
    depth = deepest = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _float(digits: str) -> float:
    if len(digits) > MAX_DIGITS or not math.isfinite(value := float(digits)):
        raise ValueError("a number is too large")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("a number is too large")
    return int(digits)
