"""Episodes that come from another process as their line of the record, so that this one need not encode them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.runs.metrics import Summary, summarize
from agentenv.runs.records.index import Row, make_row, summary_of
from agentenv.runs.records.lines import crc_of, decode_episode, decode_line, encode_line

_KNOWN = frozenset(("task", "episode_id", "group_id", "attempt", "stop_reason", "error"))


def encoded(trajectory: Trajectory) -> tuple[bytes, Row]:
    """Return the line of an episode in the record, and its row in the index of a record that has no other line.

    Raises:
        DataError: no record can hold it.
    """
    line, row, _ = entry_of(trajectory)
    return line, row


def entry_of(trajectory: Trajectory) -> tuple[bytes, Row, Summary]:
    """Return what `encoded` returns, and the Summary of the episode.

    Raises:
        DataError: as `encoded`.
    """
    if isinstance(trajectory, EncodedTrajectory):
        return trajectory.line, trajectory.row, trajectory.summary
    line, summary = encode_line(trajectory), summarize(trajectory)
    return line, make_row(trajectory, summary, 0, len(line), crc_of(line)), summary


class EncodedTrajectory(Trajectory):
    """An episode that did not fail, with what `entry_of` returns; its line is decoded if more is asked for.

    What is asked for then is what a reader of the record gets; see `trajectory_to_dict`.
    """

    __slots__ = ("line", "row", "summary")

    line: bytes
    row: Row
    summary: Summary

    @classmethod
    def of(cls, line: bytes, row: Row, task: Task) -> Self:
        """Return the episode; `task` is its task, as this process has it."""
        summary, self = summary_of(row), cls.__new__(cls)
        self.line, self.row, self.summary, self.task, self.error = line, row, summary, task, None
        self.episode_id, self.group_id, self.attempt = summary.episode_id, summary.group_id, summary.attempt
        self.stop_reason = summary.stop_reason
        return self

    def __getattr__(self, name: str) -> Any:
        """Decode the line for a field that is not known without it."""
        own = {field.name for field in dataclasses.fields(Trajectory)} - _KNOWN
        if name not in own:
            raise AttributeError(f"{type(self).__name__}: expected a field, got {name!r}. Check the name.")
        whole = decode_episode(decode_line(self.line) or b"")
        for each in own:
            setattr(self, each, getattr(whole, each))
        return getattr(self, name)
