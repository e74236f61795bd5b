"""Files that grow, for pages: whole lines from a place on, the rows of a run's index, and what its learner computed.

Another process may append to a file meanwhile, cut it or replace it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import zlib
from dataclasses import dataclass, replace
from typing import Any, Self

from agentenv.core.trajectory import Trajectory
from agentenv.errors import DataError
from agentenv.runs.records.index import HEADER, row_line, rows_in_store, store_index
from agentenv.runs.records.token_stats import TOKEN_STATS, TokenStats, hash_actions, sampled_tokens
from agentenv.view.viewed import TRAJECTORIES, ViewedRun

READ_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 26
_CHECKED_BYTES = 256
_BLOCK_BYTES = 1 << 20
"""Bytes of the record whose rows are computed between two answers."""
_NUMBERS = b',"logprobs":'
"""Begins the numbers of a line of token_stats.jsonl; before it are its step and episode."""


@dataclass(frozen=True, slots=True)
class TailPlace:
    """A place in a file, which is known again after the file was cut or replaced."""

    inode: int = 0
    offset: int = 0
    crc: int = 0
    """Of the first bytes and of those before the offset: lines of equal episodes differ at their beginning only."""

    def __str__(self) -> str:
        return f"{self.inode:x}:{self.offset:x}:{self.crc:x}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the place that a client sends back; the beginning for any other text."""
        try:
            inode, offset, crc = (int(part, 16) for part in text.split(":"))
        except ValueError:
            return cls()
        return cls(inode, offset, crc) if offset >= 0 else cls()


@dataclass(frozen=True, slots=True)
class FileTail:
    """Lines after a place."""

    lines: bytes
    """Whole lines; empty at the end of the file."""
    place: TailPlace
    """Behind them."""
    was_reset: bool = False
    """True if the file is no longer the one of the place: the lines are its first."""
    progress: tuple[int, int] | None = None
    """Bytes that were read for an index, and all of them, while the index is made."""


def read_tail(run: ViewedRun, name: str, place: TailPlace) -> FileTail:
    """Return the whole lines of a run's file after a place that are JSON objects or arrays; see `read_lines_after`."""
    tail = read_lines_after(run, name, place)
    kept = [line for line in tail.lines.splitlines(keepends=True) if line.startswith((b"{", b"["))]
    return replace(tail, lines=b"".join(kept))


def read_lines_after(run: ViewedRun, name: str, place: TailPlace, num_bytes: int = READ_BYTES) -> FileTail:
    """Return the whole lines of a run's file after a place, about `num_bytes` at most.

    A line that is still being written is left for the next call.

    Raises:
        DataError: the file cannot be read, or a line is too long.
    """
    with run.open(name) as file:
        if file is None:
            return FileTail(b"", TailPlace(), was_reset=place.offset > 0)
        fd = file.fileno()
        start, content = place.offset, _read(fd, place.offset, num_bytes)
        first, last = _edges_before(fd, place.offset)  # read last: a cut before the content was read shows
        inode = os.fstat(fd).st_ino
        lost = place.offset > 0 and (inode, _crc_of(first, last)) != (place.inode, place.crc)
        if lost:
            start, content, first, last = 0, _read(fd, 0, num_bytes), b"", b""
        lines = content[: content.rfind(b"\n") + 1]
        if not lines and len(content) >= MAX_LINE_BYTES:
            raise DataError(
                f"{run.path}: expected lines of at most {MAX_LINE_BYTES} bytes in {name}, got a longer one."
            )
        # The checksum is of what was read, not of what the file has by now: else a cut would never show.
        crc = _crc_of(first + lines[:_CHECKED_BYTES], last + lines[-_CHECKED_BYTES:])
        return FileTail(lines, TailPlace(inode, start + len(lines), crc), was_reset=lost)


def _edges_before(fd: int, offset: int) -> tuple[bytes, bytes]:
    """Return the first and the last bytes before an offset, as far as `_crc_of` checks them."""
    num = min(offset, _CHECKED_BYTES)
    return os.pread(fd, num, 0), os.pread(fd, num, offset - num)


def _crc_of(first: bytes, last: bytes) -> int:
    return zlib.crc32(last[-_CHECKED_BYTES:], zlib.crc32(first[:_CHECKED_BYTES]))


def _read(fd: int, start: int, num_bytes: int) -> bytes:
    """Return about `num_bytes` bytes of a file, and more if they end no line."""
    content = os.pread(fd, num_bytes, start)
    while len(content) >= num_bytes and b"\n" not in content and len(content) < MAX_LINE_BYTES:
        content += os.pread(fd, num_bytes, start + len(content))
    return content


class IndexTail:
    """The index of a record that may be written meanwhile; may be used from several threads.

    What no stored index covers is computed by blocks, so that the first rows are there at once. An index that was
    computed from the beginning is stored.
    """

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._guard = threading.Lock()
        self._data = bytearray()
        self._crc = 0
        self._place = TailPlace()
        """Behind the lines of the record that have their rows."""
        self._epoch = 0
        """Another number for each record: one that replaces another has other rows."""
        self._is_new = False
        """True if the index was computed from its beginning and is not stored yet."""

    def read(self, place: TailPlace) -> FileTail:
        """Return the rows after a place of the index.

        Raises:
            DataError: the record cannot be read.
        """
        with self._guard:
            if not self._data:
                self._start()
            while True:
                lost = place.offset > 0 and (place.inode != self._epoch or place.offset > len(self._data))
                start = 0 if lost else place.offset
                if start < len(self._data) or not self._advance():
                    break
            last = min(start + READ_BYTES, len(self._data)) - 1
            lines = bytes(self._data[start : self._data.find(b"\n", max(last, start)) + 1]) if last >= start else b""
            done, total = self._place.offset, self._run.size(TRAJECTORIES)
            progress = (done, total) if total - done > _BLOCK_BYTES else None
            return FileTail(lines, TailPlace(self._epoch, start + len(lines)), was_reset=lost, progress=progress)

    def _start(self) -> None:
        """Begin with the stored index of the record."""
        stored, end = b"", 0
        with self._run.open(TRAJECTORIES) as file:
            if file is not None:
                stored, end = rows_in_store(self._run.folder, file)
                fd = file.fileno()
                self._place = TailPlace(os.fstat(fd).st_ino, end, _crc_of(*_edges_before(fd, end)))
        self._data = bytearray(stored or HEADER)
        self._crc = zlib.crc32(self._data)
        self._is_new = not end
        self._epoch = secrets.randbits(48)

    def _advance(self) -> bool:
        """Add the rows of a block of lines, and return False if there are none."""
        tail = read_lines_after(self._run, TRAJECTORIES, self._place, _BLOCK_BYTES)
        if tail.was_reset:
            self._start()
            return True
        offset = self._place.offset
        for line in tail.lines.splitlines(keepends=True):
            row = row_line(line, offset, self._crc)
            if row is not None:
                self._data += row
                self._crc = zlib.crc32(row, self._crc)
            offset += len(line)
        self._place = tail.place
        if self._is_new and not tail.lines and offset:
            store_index(self._run.folder, bytes(self._data))
            self._is_new = False
        return bool(tail.lines)


class LearnedLines:
    """Finds the line of an episode in a file that may be written meanwhile; may be used from several threads.

    Only where the lines are is in memory.
    """

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._guard = threading.Lock()
        self._place = TailPlace()
        self._lines: dict[str, tuple[int, int]] = {}
        """Offset and length of the last line of each episode."""

    def of(self, trajectory: Trajectory) -> dict[str, Any] | None:
        """Return `step`, and by sampled token `logprobs` and `advantages`, with None for what is not known.

        None if the learner noted nothing of the episode, or noted other tokens: those of an attempt before a resume.
        """
        try:
            with self._guard:
                self._follow()
                offset, length = self._lines.get(trajectory.episode_id, (0, 0))
            with self._run.open(TOKEN_STATS) as file:
                if file is None or not length:
                    return None
                file.seek(offset)
                stats = TokenStats.from_line(file.read(length))
        except DataError:  # a damaged line costs its episode these numbers only
            return None
        if stats.episode_id != trajectory.episode_id or stats.action_hash != hash_actions(sampled_tokens(trajectory)):
            return None
        # Six significant digits are more than a page shows.
        logprobs, advantages = (
            [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
            for values in (stats.logprobs, stats.advantages)
        )
        return {"step": stats.step, "logprobs": logprobs, "advantages": advantages}

    def _follow(self) -> None:
        """Add the lines that were written since the last call."""
        while True:
            tail = read_lines_after(self._run, TOKEN_STATS, self._place)
            if tail.was_reset:
                self._lines.clear()
            offset = tail.place.offset - len(tail.lines)
            for line in tail.lines.splitlines(keepends=True):
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    episode_id = json.loads(line.partition(_NUMBERS)[0] + b"}")["episode_id"]
                    if isinstance(episode_id, str):
                        self._lines[episode_id] = offset, len(line)
                offset += len(line)
            self._place = tail.place
            if not tail.lines:
                return
