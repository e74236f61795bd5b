"""Reads boxes as models write them: JSON or Python, fenced or cut off in the middle. Linear in the text's length."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_CHARS = 200_000
"""Longer answers are none."""
_MAX_DEPTH = 8
_MAX_COORDINATE = 1e9
_OPEN, _CLOSE = "<answer>", "</answer>"
_FENCE = re.compile(r"\s*(?:`{3,}\w{0,20})?\s*")
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,3})?(?![\w.])", re.ASCII)
_WORD = re.compile(r"(?:true|false|null|True|False|None|NaN|nan|-?Infinity|-?inf)(?!\w)")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SINGLE_END = re.compile(r"(?<!\\)'(?=\s*(?:[,:}\])]|\Z))")
"""An apostrophe ends a text only where something can follow: `'the dog's bowl'` is one label."""
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class Box(NamedTuple):
    """A box and what is in it; sorts by value."""

    label: str
    """In lower case, white space made single."""
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Boxes:
    """What an answer names."""

    images: tuple[tuple[Box, ...], ...]
    """Per image, sorted, each box once; an answer that is no list of lists is about one image."""
    num_invalid: int = 0
    """Entries that are no boxes."""
    whole: bool = True
    """Whether the list has its end, and nothing but a fence around it."""

    def __len__(self) -> int:
        """How many boxes there are, over all images."""
        return sum(map(len, self.images))


def answer_block(text: str) -> tuple[str | None, bool]:
    """What stands in the last `<answer>` block, None without one, and whether the block is well formed.

    It is, where there is one block only and each of its tags has a line of its own. The last block may lack its end.
    """
    start = text.rfind(_OPEN)
    if start < 0:
        return None, False
    block, closed, _ = text[start + len(_OPEN) :].partition(_CLOSE)
    alone = text.count(_OPEN) == text.count(_CLOSE) == 1 and bool(closed)
    lines = (
        text[:start].rstrip(" \t")[-1:] in ("", "\n") and block.lstrip(" \t")[:1] == "\n" == block.rstrip(" \t")[-1:]
    )
    return block, alone and lines


def read_boxes(text: str) -> Boxes | None:
    """The boxes in a text, up to where it is cut off or no list any more; None where no list begins."""
    start = text.find("[")
    if start < 0 or len(text) > MAX_CHARS:
        return None
    entries: list[Any] = []
    reader = _Reader(text, start + 1)
    try:
        reader.fill(entries, "]", depth=0)
        around = (text[:start], text[reader.at :])
        whole = all(_FENCE.fullmatch(part) for part in around)
    except _Cut:
        whole = False
    return boxes_of(entries, whole=whole)


def boxes_of(entries: Sequence[Any], *, whole: bool = True) -> Boxes:
    """The boxes among entries `{"bbox_2d": [x1, y1, x2, y2], "label": …}`, or among lists of these, one per image."""
    nested = any(isinstance(entry, list | tuple) for entry in entries)
    rows = [entry if isinstance(entry, list | tuple) else [entry] for entry in entries] if nested else [entries]
    found = [[_box(entry) for entry in row] for row in rows]
    images = tuple(tuple(sorted({box for box in row if box is not None})) for row in found)
    return Boxes(images, sum(box is None for row in found for box in row), whole)


def _box(entry: Any) -> Box | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("label"), str):
        return None
    corners = entry.get("bbox_2d")
    if not isinstance(corners, list | tuple) or len(corners) != 4 or not all(map(_is_coordinate, corners)):
        return None
    x1, y1, x2, y2 = map(float, corners)
    return Box(" ".join(entry["label"].split()).lower(), x1, y1, x2, y2) if x1 <= x2 and y1 <= y2 else None


def _is_coordinate(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and abs(value) <= _MAX_COORDINATE


class _Cut(Exception):
    """The text ends, or goes on as no list does."""


class _Reader:
    """Values of JSON and of Python's literals; a list has its items as soon as they are complete."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at

    def fill(self, items: list[Any], end: str, *, depth: int) -> None:
        """Read items into a list, up to its end."""
        while not self._take(end):
            self._next(depth)
            if self._take("["):
                items.append([])
                self.fill(items[-1], "]", depth=depth + 1)
            else:
                items.append(self._value(depth))
            if not self._take(",") and not self._ahead(end):
                raise _Cut

    def _value(self, depth: int) -> Any:
        for opening, end in (("[", "]"), ("(", ")")):
            if self._take(opening):
                items: list[Any] = []
                self.fill(items, end, depth=depth + 1)
                return items
        if self._take("{"):
            return self._mapping(depth + 1)
        if self._ahead('"') or self._ahead("'"):
            return self._string()
        if (number := _NUMBER.match(self._text, self.at)) is not None:
            self.at = number.end()
            return float(number[0])
        if (word := _WORD.match(self._text, self.at)) is not None:
            self.at = word.end()
            return None
        raise _Cut

    def _mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._take("}"):
            self._next(depth)
            name = self._string()
            if not self._take(":"):
                raise _Cut
            self._next(depth)
            found[name] = self._value(depth)
            if not self._take(",") and not self._ahead("}"):
                raise _Cut
        return found

    def _string(self) -> str:
        if (double := _DOUBLE.match(self._text, self.at)) is not None:
            self.at = double.end()
            return _unescaped(double[1])
        if not self._ahead("'") or (end := _SINGLE_END.search(self._text, self.at + 1)) is None:
            raise _Cut
        body, self.at = self._text[self.at + 1 : end.start()], end.end()
        return _unescaped(body)

    def _next(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _Cut
        self.at = _SPACE.match(self._text, self.at).end()  # type: ignore[union-attr]

    def _ahead(self, character: str) -> bool:
        return self._text.startswith(character, self.at)

    def _take(self, character: str) -> bool:
        """Go behind a character, if it comes next."""
        self._next(0)
        if not self._ahead(character):
            return False
        self.at += 1
        return True


def _unescaped(body: str) -> str:
    if "\\" not in body:
        return body

    def one(escape: re.Match[str]) -> str:
        """What an escape stands for."""
        name = escape[1]
        return chr(int(name[1:], 16)) if len(name) > 1 else _ESCAPED.get(name, name)

    text = _ESCAPE.sub(one, body)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON writes an emoji as two halves
