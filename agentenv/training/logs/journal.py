"""The journal of a training run: `metrics.jsonl`, with one line per train step in order, and trackers."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv._util.disk import sync_directory, write_whole
from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.runs.records.steps import STEPS
from agentenv.runs.trackers import Tracker, Trackers

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

_SYNC_INTERVAL_S = 1.0


class Journal:
    """Writes `metrics.jsonl`, one line per train step, and updates trackers. Not thread-safe.

    Each line is a single write at the end of the file, so a killed training run loses none.

    Args:
        folder: the run's folder; created if missing.
        trackers: updated every `logging_steps` steps and after every evaluation.
        resume_step: step of the checkpoint to resume from; lines of later steps are removed. None for a new training.
        logging_steps: steps between updates of trackers; the file has every step.

    Raises:
        ConfigError: a new training finds lines, or the file is not writable.
        DataError: a line is damaged.
    """

    def __init__(
        self, folder: Path, *, trackers: Sequence[Tracker] = (), resume_step: int | None = None, logging_steps: int = 1
    ) -> None:
        self.path = Path(folder) / METRICS
        self._trackers = Trackers(trackers, self.path)
        self._logging_steps = logging_steps
        self._synced_s = time.monotonic()
        self._fd = -1
        self.last_step = resume_step
        """Step of the last line; None before the first."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            has_lines = self.path.exists()
            # A new folder has neither, also on resume, from checkpoints of another one.
            is_new = not has_lines and not self.path.with_name(STEPS).exists()
            content = self.path.read_bytes() if has_lines else b""
            rows = _rows(self.path, content)
            if rows and resume_step is None:
                raise ConfigError(
                    f"{self.path}: expected no training there, got one of {rows[-1]['step']} steps. "
                    "Resume it with --resume, or use another --out."
                )
            kept = [row for row in rows if resume_step is not None and row["step"] <= resume_step]
            self._last: dict[str, Any] = {"step": resume_step}
            if kept and kept[-1]["step"] == resume_step:
                self._last = kept[-1]
            elif resume_step and not is_new:
                last = kept[-1]["step"] if kept else None
                logger.warning(
                    "%s: the last line belongs to step %s, the checkpoint to step %d", self.path, last, resume_step
                )
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.ftruncate(self._fd, sum(len(line) + 1 for line in content.split(b"\n")[: len(kept)]))
            os.fsync(self._fd)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: expected a writable file, got {error}. Fix it, or use another --out."
            ) from error

    def log(self, step: int, numbers: Mapping[str, float], warnings: Sequence[str] = ()) -> None:
        """Add the line of the next train step. Numbers that are not finite become null; without `warnings` no key.

        A tracker that fails causes one warning and is retried later.

        Raises:
            ValueError: the step is not the next one, or the journal is closed.
            RunStopped: the disk is full or fails; earlier lines are complete.
        """
        if self._fd < 0 or "step" in numbers or step < 0 or (self.last_step is not None and step != self.last_step + 1):
            raise ValueError(
                f"Journal.log: expected the step after {self.last_step} in an open journal, got {step} with "
                f"{len(numbers)} numbers. Log every step once, in order."
            )
        last: dict[str, Any] = {"step": step, **finite(numbers)}
        if warnings:
            last["warnings"] = list(warnings)
        try:
            write_whole(self._fd, _line(last))
            if time.monotonic() - self._synced_s >= _SYNC_INTERVAL_S:
                self.sync()
        except OSError as error:
            raise self._stopped(error) from error
        self.last_step, self._last = step, last
        if step % self._logging_steps == 0 or any(key.startswith("eval/") for key in numbers):
            self._trackers.log(step, numbers)

    @property
    def has_evaluation(self) -> bool:
        """True if the last line contains an evaluation."""
        return any(key.startswith("eval/") for key in self._last)

    def amend(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the last line. A killed process leaves the old line or the new one.

        Raises:
            RunStopped: the disk is full or fails; the old line is complete.
        """
        last = self._last | finite(numbers)
        temporary = self.path.with_name(f".{METRICS}.tmp")
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)  # JSON has no other ends of lines
            if lines and json.loads(lines[-1])["step"] == last["step"]:  # it may have none: lines were lost
                del lines[-1]
            with temporary.open("wb") as file:
                file.writelines([*lines, _line(last)])
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            os.close(self._fd)
            self._fd, self._last = os.open(self.path, os.O_WRONLY | os.O_APPEND), last
            sync_directory(self.path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._stopped(error) from error
        self._trackers.log(last["step"], numbers)

    def sync(self) -> None:
        """Sync all lines to disk. Call it before a checkpoint is written, so that a power cut leaves no gap.

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
            f"{self.path}: expected to write a line, got {error}. Earlier lines are kept. Make room, then resume with "
            "--resume."
        )

    def close(self) -> None:
        """Sync the file and close the trackers; further calls do nothing.

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
            self._trackers.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Return the numbers for JSON: those that are not finite become None."""
    plain = {key: value if value is None or isinstance(value, int) else float(value) for key, value in numbers.items()}
    infinite = {key for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)}
    return plain | dict.fromkeys(infinite)


def _rows(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Return the lines of a journal, without an incomplete last one."""
    rows: list[dict[str, Any]] = []
    *lines, _ = content.split(b"\n")  # not splitlines: damaged bytes may contain other line ends
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or (rows and step <= rows[-1]["step"]):
            raise DataError(
                f"{path}: expected the numbers of a train step in line {number}, got {line[:60]!r}. "
                "Fix or remove the line."
            )
        rows.append(row)
    return rows


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, without an incomplete last one; empty if the file is missing.

    Raises:
        DataError: a line is damaged, or repeats a step.
    """
    path = Path(folder) / METRICS
    return _rows(path, path.read_bytes()) if path.exists() else []
