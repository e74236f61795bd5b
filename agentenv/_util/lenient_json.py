"""Read values that a model wrote: strict JSON, Python literals, and lists that are cut off. Takes linear time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

MAX_CHARS = 1 << 18
MAX_DEPTH = 64
MAX_DIGITS = 300
"""Limits of `read_json`. A float, the number type of most JSON readers, cannot hold a longer integer."""
_MAX_LITERAL_DEPTH = 100
_MAX_LITERAL_DIGITS = 4300  # what Python's `int` reads
_MAX_PARTIAL_DEPTH = 9

_SPACE = re.compile(r"[ \t\r\n]*+")
_ANY_SPACE = re.compile(r"\s*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_LOOSE_NUMBER = re.compile(
    r"[+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,3})?(?![\w.])|-?inf(?:inity)?\b", re.ASCII | re.I
)
_JSON_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+')
_PYTHON_STRINGS = {
    quote: re.compile(rf"{quote}[^{quote}\\]*+(?:\\.[^{quote}\\]*+)*+", re.DOTALL) for quote in ('"', "'")
}
_ANY_STRING = re.compile(_PYTHON_STRINGS['"'].pattern + '"?', re.DOTALL)
_END_OF_LABEL = re.compile(r"(?<!\\)'(?=\s*(?:[,:}\])]|\Z))")
"""An apostrophe ends a string only where something can follow: `'the dog's bowl'` is one string."""
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {c: c for c in "\\'\"/"}
_WORD = re.compile(r"[A-Za-z_][\w.-]*+")
_CONSTANTS = {"true": True, "false": False, "null": None}
_PYTHON_CONSTANTS = _CONSTANTS | {"True": True, "False": False, "None": None}
_LOOSE_CONSTANTS = _PYTHON_CONSTANTS | {"NaN": math.nan, "nan": math.nan}
_BRACKET = re.compile(r"[\[\]{}]")


class LiteralError(ValueError):
    """A text that does not hold the value that was to be read."""

    def __init__(self, problem: str, at: int = 0) -> None:
        super().__init__(problem)
        self.at = at
        """Where in the text reading stopped."""


def skip_space(text: str, at: int) -> int:
    """Return the first position from `at` on that does not hold JSON whitespace."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def read_json(text: str) -> Any:
    """Return the JSON value that the whole text is, without the extensions of Python's reader.

    Raises:
        LiteralError: the text is not JSON; it has a duplicate key in one object, NaN or an infinite number, a number
            of more than `MAX_DIGITS` digits, more than `MAX_DEPTH` levels or more than `MAX_CHARS` characters.
    """
    if len(text) > MAX_CHARS:
        raise LiteralError(f"it is longer than {MAX_CHARS} characters")
    depth = deepest = 0
    for bracket in _BRACKET.finditer(_ANY_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise LiteralError(f"it has more than {MAX_DEPTH} levels")
    try:
        return json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_number, parse_float=_number, parse_int=_number
        )
    except json.JSONDecodeError as error:
        raise LiteralError(str(error), error.pos) from error


def read_literal(text: str, at: int, *, python: bool = False, quote: str = "") -> tuple[Any, int]:
    """Return the value that begins at `at`, after whitespace, and the position where it ends.

    It reads strict JSON; with `python` also True, None, tuples, keys without quotes and both kinds of quotes; with
    `quote` also strings between two of those, without escapes. Lone surrogates become U+FFFD, since no tokenizer
    accepts them.

    Raises:
        LiteralError: the text has no such value; says what is wrong and where.
    """
    reader = _Reader(text, at, python=python, quote=quote)
    return reader.value(0), reader.at


def read_whole_literal(text: str) -> Any:
    """Return the value that the whole text is, in JSON or as Python writes it.

    Raises:
        LiteralError: the text is not such a value.
    """
    value, end = read_literal(text, 0, python=True)
    if skip_space(text, end) < len(text):
        raise LiteralError("text after the value", end)
    return value


def read_partial_list(text: str, at: int) -> tuple[list[Any], int | None]:
    """Return the complete items of the list whose `[` is at `at`, and its end; None if it is cut off or not a list.

    Items may be JSON or Python literals, with `+1`, `.5`, NaN and unescaped apostrophes. A nested list that is cut off
    keeps its complete items; any other nested value that is cut off is dropped.
    """
    reader, items = _Reader(text, at, python=True, partial=True), list[Any]()
    try:
        reader.fill(items, "]", 0, reader.value)
    except LiteralError:
        return items, None
    return items, reader.at


class _Reader:
    """Reads a value from `text` at `at`, which moves behind what has been read."""

    def __init__(self, text: str, at: int, *, python: bool, quote: str = "", partial: bool = False) -> None:
        self.text = text
        self.at = at
        self.python = python
        self.quote = quote
        self.partial = partial
        self.max_depth = _MAX_PARTIAL_DEPTH if partial else _MAX_LITERAL_DEPTH
        self.constants = _LOOSE_CONSTANTS if partial else _PYTHON_CONSTANTS if python else _CONSTANTS

    def value(self, depth: int) -> Any:
        """Read the next value; `depth` is the number of objects and lists around it."""
        self._skip_space()
        char = self.text[self.at : self.at + 1]
        items: list[Any] = []
        if self._at_string():
            return self._string()
        if char == "{":
            self.fill(items, "}", depth, self._pair)
            return dict(items)
        if char == "[" or (char == "(" and self.python):
            self.fill(items, "]" if char == "[" else ")", depth, self.value)
            return items
        if number := (_LOOSE_NUMBER if self.partial else _NUMBER).match(self.text, self.at):
            value = _number(number[0], _MAX_LITERAL_DIGITS, at=self.at, finite=not self.partial)
            self.at = number.end()
            return value
        word = _WORD.match(self.text, self.at)
        if word and word[0] in self.constants:
            self.at = word.end()
            return self.constants[word[0]]
        return self._fail("a value")

    def fill(self, items: list[Any], close: str, depth: int, read: Callable[[int], Any]) -> None:
        """Append what `read` returns to `items`, up to `close`; complete items stay there if an error is raised."""
        if depth >= self.max_depth:
            raise LiteralError(f"more than {self.max_depth} levels of nesting", self.at)
        self.at += 1
        while not self._take(close):
            if items:
                if not self._take(","):
                    self._fail(f"',' or {close!r}")
                if self.python and self._take(close):
                    return
            if self.partial and close == "]" and self._next_is("["):
                items.append([])
                self.fill(items[-1], "]", depth + 1, self.value)
            else:
                items.append(read(depth + 1))

    def _pair(self, depth: int) -> tuple[str, Any]:
        self._skip_space()
        word = _WORD.match(self.text, self.at) if self.python else None
        if self._at_string():
            key = self._string()
        elif word:
            key, self.at = word[0], word.end()
        else:
            self._fail("a key in double quotes")
        if not self._take(":"):
            self._fail("':'")
        return key, self.value(depth)

    def _at_string(self) -> bool:
        if self.quote and self.text.startswith(self.quote, self.at):
            return True
        return self.text[self.at : self.at + 1] in (('"', "'") if self.python else ('"',))

    def _string(self) -> str:
        at, unclosed = self.at, LiteralError("a string that is never closed", len(self.text))
        if self.quote not in ("", '"', "'") and self.text.startswith(self.quote, at):
            start = at + len(self.quote)
            end = self.text.find(self.quote, start)
            if end < 0:
                raise unclosed
            self.at = end + len(self.quote)
            return self.text[start:end]
        char = self.text[at]
        if self.partial and char == "'":
            closing = _END_OF_LABEL.search(self.text, at + 1)
            end = closing.start() if closing else len(self.text)
        else:
            found = (_PYTHON_STRINGS[char] if self.python else _JSON_STRING).match(self.text, at)
            end = found.end() if found else at
        if end + (self.text[end : end + 1] == "\\") == len(self.text):
            raise unclosed
        if self.text[end] != char:
            raise LiteralError("a line break or control character in a string: write it as \\n or \\u000a", end)
        self.at = end + 1
        if self.python:
            return _joined_surrogates(_ESCAPE.sub(_unescape, self.text[at + 1 : end]))
        try:
            return _joined_surrogates(json.loads(self.text[at : end + 1]))
        except ValueError as error:
            raise LiteralError("a wrong escape in a string: write a backslash as \\\\", end) from error

    def _skip_space(self) -> None:
        found = (_ANY_SPACE if self.partial else _SPACE).match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _next_is(self, char: str) -> bool:
        self._skip_space()
        return self.text.startswith(char, self.at)

    def _take(self, char: str) -> bool:
        taken = self._next_is(char)
        self.at += taken
        return taken

    def _fail(self, expected: str) -> NoReturn:
        found = repr(self.text[self.at : self.at + 12]) if self.at < len(self.text) else "the end"
        raise LiteralError(f"expected {expected}, got {found}", self.at)


def _number(digits: str, max_digits: int = MAX_DIGITS, *, at: int = 0, finite: bool = True) -> int | float:
    """Return the number. The limit on its digits keeps huge integers, which take quadratic time, out of all readers."""
    if len(digits.lstrip("+-")) > max_digits:
        raise LiteralError(f"a number that is too large: it has more than {max_digits} digits", at)
    number = int(digits) if digits.lstrip("+-").isdigit() else float(digits)
    if finite and isinstance(number, float) and not math.isfinite(number):
        raise LiteralError("a number that is too large, or not finite", at)
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise LiteralError("a key occurs twice in one object")
    return result


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, found[0])


def _joined_surrogates(text: str) -> str:
    """Return the text with pairs of escaped surrogates joined into characters and lone ones replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
