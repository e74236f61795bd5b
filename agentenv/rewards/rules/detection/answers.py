"""Read boxes as models write them: JSON or Python, fenced or cut off in the middle. Linear in the text's length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentenv._util.lenient_json import read_partial_list

MAX_CHARS = 200_000
"""Longer answers are not read."""
_MAX_COORDINATE = 1e9
_OPEN, _CLOSE = "<answer>", "</answer>"
_FENCE = re.compile(r"\s*(?:`{3,}\w{0,20})?\s*")


class Box(NamedTuple):
    """A labeled box; sorts by value."""

    label: str
    """In lower case, with single spaces."""
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes that an answer names."""

    images: tuple[tuple[Box, ...], ...]
    """Per image, sorted, without duplicates. An answer that is not a list of lists describes one image."""
    num_invalid: int = 0
    """Entries that are not boxes."""
    complete: bool = True
    """True if the list is closed and has nothing but a code fence around it."""

    def __len__(self) -> int:
        """Return the number of boxes over all images."""
        return sum(map(len, self.images))


def answer_block(text: str) -> tuple[str | None, bool]:
    """Return the content of the last `<answer>` block, None without one, and True if the block is well formed.

    A well-formed block is the only one, and each of its tags stands on its own line. The last block may lack its end.
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
    """Return the boxes up to where the list ends, is cut off or is not a list; None if the text has no list."""
    start = text.find("[")
    if start < 0 or len(text) > MAX_CHARS:
        return None
    entries, end = read_partial_list(text, start)
    complete = end is not None and all(_FENCE.fullmatch(part) for part in (text[:start], text[end:]))
    return boxes_of(entries, complete=complete)


def boxes_of(entries: Sequence[Any], *, complete: bool = True) -> Boxes:
    """Return the boxes among entries `{"bbox_2d": [x1, y1, x2, y2], "label": …}`, or among lists of these per image."""
    nested = any(isinstance(entry, list | tuple) for entry in entries)
    rows = [entry if isinstance(entry, list | tuple) else [entry] for entry in entries] if nested else [entries]
    found = [[_box(entry) for entry in row] for row in rows]
    images = tuple(tuple(sorted({box for box in row if box is not None})) for row in found)
    return Boxes(images, sum(box is None for row in found for box in row), complete)


def _box(entry: Any) -> Box | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("label"), str):
        return None
    corners = entry.get("bbox_2d")
    if not isinstance(corners, list | tuple) or len(corners) != 4:
        return None
    for corner in corners:
        if not isinstance(corner, int | float) or isinstance(corner, bool) or not abs(corner) <= _MAX_COORDINATE:
            return None
    x1, y1, x2, y2 = map(float, corners)
    return Box(" ".join(entry["label"].split()).lower(), x1, y1, x2, y2) if x1 <= x2 and y1 <= y2 else None
