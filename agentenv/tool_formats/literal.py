"""Values as models write them inside calls: strict JSON, or Python literals with odd quotes. Takes linear time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

_SPACE = re.compile(r"[ \t\r\n]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_JSON_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+')
_PYTHON_STRINGS = {
    quote: re.compile(rf"{quote}[^{quote}\\]*+(?:\\.[^{quote}\\]*+)*+", re.DOTALL) for quote in ('"', "'")
}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {c: c for c in "\\'\"/"}
_WORD = re.compile(r"[A-Za-z_][\w.-]*+")
_CONSTANTS = {"true": True, "false": False, "null": None}
_PYTHON_CONSTANTS = _CONSTANTS | {"True": True, "False": False, "None": None}
_MAX_DEPTH = 100


class LiteralError(ValueError):
    """No value is written there."""

    def __init__(self, problem: str, at: int) -> None:
        super().__init__(problem)
        self.at = at
        """Where in the text reading stopped."""


def skip_space(text: str, at: int) -> int:
    """The first place from `at` on that is no whitespace."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def read(text: str, at: int, *, python: bool = False, quote: str = "") -> tuple[Any, int]:
    """The value that begins at `at` (whitespace aside), and where it ends.

    JSON, strictly; with `python`, True, None, tuples, keys without quotes and both kinds of quotes too; with `quote`, a
    string also stands between two of those, without escapes. Lone surrogates become U+FFFD: no tokenizer takes them.

    Raises:
        LiteralError: there is no such value; with what is wrong and where.
    """
    return _Reader(text, python=python, quote=quote).value(at, 0)


def read_whole(text: str) -> Any:
    """The value that is all of the text, in JSON or as Python writes it.

    Raises:
        LiteralError: it is no such value.
    """
    value, end = read(text, 0, python=True)
    if skip_space(text, end) < len(text):
        raise LiteralError("text after the value", end)
    return value


class _Reader:
    def __init__(self, text: str, *, python: bool, quote: str) -> None:
        self.text, self.python, self.quote = text, python, quote
        self.constants = _PYTHON_CONSTANTS if python else _CONSTANTS

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value at `at`."""
        at = skip_space(self.text, at)
        char = self.text[at : at + 1]
        if self._is_string(at):
            return self._string(at)
        if char == "{":
            return self._items(at, depth, "}", self._pair, dict)
        if char == "[" or (char == "(" and self.python):
            return self._items(at, depth, "]" if char == "[" else ")", self.value, list)
        if number := _NUMBER.match(self.text, at):
            return _number(number[0], at), number.end()
        word = _WORD.match(self.text, at)
        if word and word[0] in self.constants:
            return self.constants[word[0]], word.end()
        return self._fail("a value", at)

    def _is_string(self, at: int) -> bool:
        if self.quote and self.text.startswith(self.quote, at):
            return True
        return self.text[at : at + 1] in (('"', "'") if self.python else ('"',))

    def _string(self, at: int) -> tuple[str, int]:
        if self.quote not in ("", '"', "'") and self.text.startswith(self.quote, at):
            start = at + len(self.quote)
            end = self.text.find(self.quote, start)
            if end < 0:
                raise LiteralError("a string that is never closed", len(self.text))
            return self.text[start:end], end + len(self.quote)
        char = self.text[at]
        found = (_PYTHON_STRINGS[char] if self.python else _JSON_STRING).match(self.text, at)
        end = found.end() if found else at
        if end + (self.text[end : end + 1] == "\\") == len(self.text):
            raise LiteralError("a string that is never closed", len(self.text))
        if self.text[end] != char:
            raise LiteralError("a line break or control character in a string: write it as \\n or \\u000a", end)
        body = self.text[at : end + 1]
        if self.python:
            return _whole(_ESCAPE.sub(_unescaped, body[1:-1])), end + 1
        try:
            return _whole(json.loads(body)), end + 1
        except ValueError as error:
            raise LiteralError("a wrong escape in a string: write a backslash as \\\\", end) from error

    def _items(self, at: int, depth: int, close: str, item: Callable[..., Any], kind: type) -> tuple[Any, int]:
        if depth >= _MAX_DEPTH:
            raise LiteralError(f"more than {_MAX_DEPTH} levels of nesting", at)
        items: list[Any] = []
        at = skip_space(self.text, at + 1)
        while self.text[at : at + 1] != close:
            if items:
                if self.text[at : at + 1] != ",":
                    self._fail(f"',' or {close!r}", at)
                at = skip_space(self.text, at + 1)
                if self.python and self.text[at : at + 1] == close:
                    break
            value, at = item(at, depth + 1)
            items.append(value)
            at = skip_space(self.text, at)
        return kind(items), at + 1

    def _pair(self, at: int, depth: int) -> tuple[tuple[str, Any], int]:
        at = skip_space(self.text, at)
        word = _WORD.match(self.text, at) if self.python else None
        if self._is_string(at):
            key, end = self._string(at)
        elif word:
            key, end = word[0], word.end()
        else:
            self._fail("a key in double quotes", at)
        end = skip_space(self.text, end)
        if self.text[end : end + 1] != ":":
            self._fail("':'", end)
        value, end = self.value(end + 1, depth)
        return (key, value), end

    def _fail(self, expected: str, at: int) -> NoReturn:
        found = repr(self.text[at : at + 12]) if at < len(self.text) else "the end"
        raise LiteralError(f"expected {expected}, got {found}", at)


def _number(text: str, at: int) -> int | float:
    try:
        number = int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError as error:  # thousands of digits
        raise LiteralError("a number with too many digits", at) from error
    if isinstance(number, float) and math.isinf(number):  # isinf itself fails for an int that no float can hold
        raise LiteralError("a number that is too large", at)
    return number


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, found[0])


def _whole(text: str) -> str:
    """The text with the halves of characters that were escaped apart joined, and lone ones replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
