"""The journal of a training: `metrics.jsonl`, a line per train step without a gap or a repeat, and trackers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.record import sync_directory
from agentenv.trainer.trackers import Tracker

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

_SYNC_INTERVAL_S = 1.0
_RETRY_AFTER_S = 60.0
"""A tracker that failed is left alone for so long: each try may hang for a while."""


class Journal:
    """`metrics.jsonl`: a line per train step; and the trackers that were asked for. Not for several threads at once.

    A line is one write at the end of the file, so a killed training loses none. `resume_step` is the step of the
    checkpoint that training goes on from: lines of later steps are cut off, since those steps are done again.

    Args:
        folder: the run's; made where it is absent.
        trackers: told every `logging_steps` steps, and of every evaluation.
        resume_step: None for a training that starts.
        logging_steps: how often trackers are told; the file has every step.

    Raises:
        ConfigError: a training that starts finds lines, or the file cannot be written.
        DataError: a line is damaged.
    """

    def __init__(
        self, folder: Path, *, trackers: Sequence[Tracker] = (), resume_step: int | None = None, logging_steps: int = 1
    ) -> None:
        self.path = Path(folder) / METRICS
        self._trackers = list(trackers)
        self._retry_at_s: dict[int, float] = {}
        self._logging_steps = logging_steps
        self._synced_s = time.monotonic()
        self._fd = -1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open(resume_step)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: expected a file that can be written, got {error}. Mend it, or use another --save_path."
            ) from error

    def _open(self, resume_step: int | None) -> None:
        rows, size = _read(self.path)
        if rows and resume_step is None:
            raise ConfigError(
                f"{self.path}: expected no training there, got one of {rows[-1][0]['step']} steps. "
                "Go on with it with --load_checkpoint, or use another --save_path."
            )
        kept = [row for row in rows if resume_step is not None and row[0]["step"] <= resume_step]
        self.last_step = resume_step
        """The step of the last line; None before the first."""
        if resume_step and (not kept or kept[-1][0]["step"] < resume_step):
            last = kept[-1][0]["step"] if kept else None
            logger.warning("%s: the last line is of step %s, and the checkpoint of %d", self.path, last, resume_step)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = kept[-1][1] if kept else 0
        self._last: dict[str, Any] = {"step": resume_step}
        self._start = self._size
        if kept and kept[-1][0]["step"] == resume_step:
            self._last, self._start = kept[-1][0], kept[-2][1] if len(kept) > 1 else 0
        if size != self._size:
            os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the line of a train step, which must follow the last one; a number that is not finite becomes null.

        A tracker that fails is warned of once and tried again later: training goes on.

        Raises:
            ValueError: the step is not the next one, or the journal is closed.
            RunStopped: the disk is full or fails; the lines before are whole.
        """
        if self._fd < 0 or "step" in numbers or step < 0 or (self.last_step is not None and step != self.last_step + 1):
            raise ValueError(
                f"Journal.log: expected the step after {self.last_step} in an open journal, got {step} with "
                f"{len(numbers)} numbers. Log every step once, in order."
            )
        start, last = self._size, {"step": step, **{key: _number(value) for key, value in numbers.items()}}
        try:
            self._write(_line(last))
            if time.monotonic() - self._synced_s >= _SYNC_INTERVAL_S:
                self.sync()
        except OSError as error:
            raise self._stopped(error) from error
        self.last_step, self._last, self._start = step, last, start
        if step % self._logging_steps == 0 or any(key.startswith("eval/") for key in numbers):
            self._track(step, numbers)

    @property
    def has_evaluation(self) -> bool:
        """Whether the line of the last step, where there is one, has an evaluation."""
        return any(key.startswith("eval/") for key in self._last)

    def amend(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the line of the last step; a kill leaves the old line or the new one.

        Raises:
            RunStopped: the disk is full or fails; the old line is whole.
        """
        last = self._last | {key: _number(value) for key, value in numbers.items()}
        temporary = self.path.with_name(f".{METRICS}.tmp")
        try:
            content = self.path.read_bytes()[: self._start] + _line(last)
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            os.close(self._fd)
            self._fd, self._last, self._size = os.open(self.path, os.O_WRONLY | os.O_APPEND), last, len(content)
            sync_directory(self.path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._stopped(error) from error
        self._track(last["step"], numbers)

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)

    def sync(self) -> None:
        """Bring all lines to the disk: before a checkpoint is written, so that a power cut leaves no gap before it.

        Raises:
            RunStopped: the disk fails.
        """
        self._synced_s = time.monotonic()
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._stopped(error) from error

    def _stopped(self, error: OSError) -> RunStopped:
        return RunStopped(
            f"{self.path}: expected a line written, got {error}. Those before are kept: make room, then go on with "
            "--load_checkpoint."
        )

    def _track(self, step: int, numbers: Mapping[str, float]) -> None:
        for index, tracker in enumerate(self._trackers):
            if time.monotonic() < self._retry_at_s.get(index, 0.0):
                continue
            try:
                tracker.log(step, numbers)
            except tracker.failures as error:
                if index not in self._retry_at_s:
                    logger.warning(
                        "%s took no numbers at step %d (%s: %s); training goes on, and all are in %s",
                        tracker.name, step, type(error).__name__, error, self.path,
                    )  # fmt: skip
                self._retry_at_s[index] = time.monotonic() + _RETRY_AFTER_S

    def close(self) -> None:
        """Bring everything to the disk and close the trackers; further calls do nothing.

        Raises:
            RunStopped: the disk fails.
        """
        if self._fd < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._fd)
            self._fd = -1
            for tracker in self._trackers:
                try:
                    tracker.close()
                except tracker.failures as error:
                    logger.warning("%s did not end well: %s: %s", tracker.name, type(error).__name__, error)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _number(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _read(path: Path) -> tuple[list[tuple[dict[str, Any], int]], int]:
    # The lines with the offset of each one's end, and the file's size; a torn last line is left out.
    content = path.read_bytes() if path.exists() else b""
    rows: list[tuple[dict[str, Any], int]] = []
    offset = 0
    *lines, _ = content.split(b"\n")  # and not at other line ends, which torn bytes may hold
    for number, line in enumerate(lines, start=1):
        offset += len(line) + 1
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or (rows and step <= rows[-1][0]["step"]):
            raise DataError(
                f"{path}: expected the numbers of a train step in line {number}, got {line[:60]!r}. "
                "Mend or remove the line."
            )
        rows.append((row, offset))
    return rows, len(content)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, in the order of the steps, but for a torn last one; none where there is no file.

    Raises:
        DataError: a line is damaged, or repeats a step.
    """
    return [row for row, _ in _read(Path(folder) / METRICS)[0]]
