"""A file of JSON lines that another process appends to, cuts or replaces: its whole lines, from a place on."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, replace
from typing import Self

from agentenv.errors import DataError
from agentenv.view.viewed import ViewedRun

READ_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 26
_CHECKED_BYTES = 256


@dataclass(frozen=True, slots=True)
class TailPlace:
    """A place in a file, which is known again after the file was cut or replaced."""

    inode: int = 0
    offset: int = 0
    crc: int = 0
    """Of the bytes before the offset."""

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


def read_tail(run: ViewedRun, name: str, place: TailPlace, num_bytes: int = READ_BYTES) -> FileTail:
    """Return the whole lines of a run's file after a place that are JSON objects or arrays; see `read_lines_after`."""
    tail = read_lines_after(run, name, place, num_bytes)
    return replace(tail, lines=_json_lines(tail.lines))


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
        before = _bytes_before(fd, place.offset)  # read last: a cut before the content was read shows
        inode = os.fstat(fd).st_ino
        lost = place.offset > 0 and (inode, zlib.crc32(before)) != (place.inode, place.crc)
        if lost:
            start, content, before = 0, _read(fd, 0, num_bytes), b""
        lines = content[: content.rfind(b"\n") + 1]
        if not lines and len(content) >= MAX_LINE_BYTES:
            raise DataError(
                f"{run.path}: expected lines of at most {MAX_LINE_BYTES} bytes in {name}, got a longer one."
            )
        # The checksum is of what was read, not of what the file has by now: else a cut would never show.
        checked = (before + lines[-_CHECKED_BYTES:])[-_CHECKED_BYTES:]
        return FileTail(lines, TailPlace(inode, start + len(lines), zlib.crc32(checked)), was_reset=lost)


def place_at(fd: int, offset: int) -> TailPlace:
    """Return a place in an open file."""
    return TailPlace(os.fstat(fd).st_ino, offset, zlib.crc32(_bytes_before(fd, offset)))


def _bytes_before(fd: int, offset: int) -> bytes:
    return os.pread(fd, min(offset, _CHECKED_BYTES), max(0, offset - _CHECKED_BYTES))


def _read(fd: int, start: int, num_bytes: int) -> bytes:
    """Return about `num_bytes` bytes of a file, and more if they end no line."""
    content = os.pread(fd, num_bytes, start)
    while len(content) >= num_bytes and b"\n" not in content and len(content) < MAX_LINE_BYTES:
        content += os.pread(fd, num_bytes, start + len(content))
    return content


def _json_lines(lines: bytes) -> bytes:
    """Return the lines without those that are neither objects nor arrays."""
    kept = [line for line in lines.splitlines(keepends=True) if line.startswith((b"{", b"["))]
    return lines if sum(map(len, kept)) == len(lines) else b"".join(kept)
