"""Find the lines of `trajectories.jsonl`: each by its checksum, and those that count."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from agentenv.core.trajectory import Trajectory
from agentenv.errors import DataError
from agentenv.runs.records.lines import MAX_LINE_BYTES, decode_episode, decode_line, split_line

_KEY = re.compile(rb'\{"episode_id":("(?:[^"\\]|\\.)*"),"error":(null)?')


@dataclass(slots=True)
class ReadReport:
    """Counts of the lines that a reader of `trajectories.jsonl` found."""

    num_lines: int = 0
    """Whole lines, including superseded ones."""
    num_superseded: int = 0
    """Lines that do not count because of another line of the same episode."""
    corrupt_lines: list[int] = field(default_factory=list)
    """Numbers, from 1, of the lines that were skipped."""
    torn_bytes: int = 0
    """Bytes after the last whole line: torn, or still being written."""

    @property
    def damage(self) -> str:
        """What was skipped, in words; empty if nothing was."""
        numbers = ", ".join(map(str, self.corrupt_lines[:10])) + ", …" * (len(self.corrupt_lines) > 10)
        found = [f"{len(self.corrupt_lines)} damaged lines ({numbers})"] if self.corrupt_lines else []
        found += [f"{self.torn_bytes} bytes of a torn last line"] if self.torn_bytes else []
        return f"skipped {' and '.join(found)}" if found else ""


class RecordLine(NamedTuple):
    """A whole line of the record whose checksum is right."""

    offset: int
    length: int
    """Bytes, with the end of the line."""
    key: bytes
    """The episode's id as JSON."""
    has_failed: bool
    crc: str
    """Checksum of the episode, as the line has it."""


def scan(file: BinaryIO, report: ReadReport, *, start: int = 0) -> list[RecordLine]:
    """Return the whole lines from byte `start` on, and count what is there in `report`; one line is in memory.

    Raises:
        DataError: a whole line has another schema.
    """
    lines: list[RecordLine] = []
    offset, number = start, 0
    file.seek(start)
    while line := file.readline(MAX_LINE_BYTES):
        begin, number = offset, number + 1
        offset += len(line)
        whole = line.endswith(b"\n")
        while not whole and (more := file.readline(MAX_LINE_BYTES)):
            offset, line, whole = offset + len(more), b"too long", more.endswith(b"\n")
        found = split_line(line)
        if found is not None and (key := _KEY.match(line, found.start)):
            lines.append(RecordLine(begin, offset - begin, key[1], key[2] is None, found.crc))
        elif not whole:
            report.torn_bytes = offset - begin
        elif line.strip():
            report.corrupt_lines.append(number)
    report.num_lines += len(lines)
    report.num_superseded = report.num_lines - len(lines_that_count(lines))
    return lines


def lines_that_count(lines: Iterable[RecordLine]) -> list[RecordLine]:
    """Return of each episode the first line that did not fail, otherwise the last, in the order of the file."""
    best: dict[bytes, RecordLine] = {}
    for line in lines:
        known = best.get(line.key)
        if known is None or known.has_failed:
            best[line.key] = line
    return sorted(best.values())


def read_line(file: BinaryIO, line: RecordLine) -> Trajectory:
    """Return the episode of a line.

    Raises:
        DataError: its values are not those of a trajectory, or it was replaced since the scan.
    """
    file.seek(line.offset)
    episode = decode_line(file.read(line.length))
    if episode is None:
        raise DataError(f"{file.name}: expected an episode at byte {line.offset}, got other bytes. Read it again.")
    try:
        return decode_episode(episode)
    except DataError as error:
        file.seek(0)
        number = 1
        while file.tell() < line.offset:
            number += file.readline(MAX_LINE_BYTES).endswith(b"\n")
        remedy = "Or delete the line: its episode then counts as not finished."
        raise DataError(f"{file.name}, line {number}: {error} {remedy}") from error
