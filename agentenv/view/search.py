"""Search for a text in the prompts, actions and observations of a record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from agentenv.errors import DataError
from agentenv.runs.records.lines import MAX_LINE_BYTES, decode_line
from agentenv.view.episodes import Place, parse_texts, texts_of
from agentenv.view.viewed import TRAJECTORIES, ViewedRun

SLICE_S = 10.0
"""Longest time of a search until its caller has to ask again."""
_READ_BYTES = 1 << 23


def search(run: ViewedRun, text: str, start: int = 0, *, fold: bool = False) -> Iterator[Place | int]:
    """Yield the place of each line whose texts contain `text`; last, an offset to continue at if the time is over.

    Args:
        run: the run.
        text: not empty.
        start: offset of a line.
        fold: ignore case; each line is then decoded, which takes ten times as long.
    """
    needle = b"" if fold else json.dumps(text)[1:-1].encode()
    wanted = text.casefold() if fold else text
    end_s = time.monotonic() + SLICE_S
    with run.open(TRAJECTORIES) as file:
        if file is None:
            return
        file.seek(start)
        # Not mapped into memory: a file that is cut meanwhile would end the process.
        while lines := file.read(_READ_BYTES) + file.readline(MAX_LINE_BYTES):
            lines = lines[: lines.rfind(b"\n") + 1]
            at = 0
            while lines and (at := lines.find(needle, at)) >= 0 and at < len(lines):
                first, last = lines.rfind(b"\n", 0, at) + 1, lines.index(b"\n", at) + 1
                if time.monotonic() > end_s:
                    yield start + first
                    return
                if _occurs(lines[first:last], wanted, fold=fold):
                    yield start + first, last - first
                at = last
            start += len(lines)


def _occurs(line: bytes, text: str, *, fold: bool) -> bool:
    try:
        episode = decode_line(line)
        found = [] if episode is None else texts_of(parse_texts(episode))
        return any(text in (each.casefold() if fold else each) for each in found)
    except (AttributeError, DataError, KeyError, TypeError):
        return False  # damaged; `/api/episodes` tells it
