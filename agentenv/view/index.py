"""The rows of a run's index for pages: the stored ones, then those of the lines that follow in the record."""

from __future__ import annotations

import secrets
import threading
import zlib

from agentenv.runs.records.index import HEADER, row_line, rows_in_store, store_index
from agentenv.view.tail import READ_BYTES, FileTail, TailPlace, place_at, read_lines_after
from agentenv.view.viewed import TRAJECTORIES, ViewedRun

_BLOCK_BYTES = 1 << 20
"""Bytes of the record whose rows are computed between two answers."""


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
                self._place = place_at(file.fileno(), end)
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
