"""The journal of a training run: `metrics.jsonl`, with one line per train step in order, and trackers."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv._util.disk import replaced, sync_directory
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records.steps import STEPS, append_rows, cut_steps, line_of, rows_of, stopping
from agentenv.runs.trackers import Tracker, Trackers

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Journal:
    """Writes `metrics.jsonl`, one line per train step, and updates trackers. Not thread-safe.

    Each line is a single write at the end of the file, so a killed training run loses none.

    Args:
        folder: the run's folder.
        trackers: updated every `logging_steps` steps and after every evaluation.
        resume_step: step of the checkpoint to resume from; lines of later steps are removed. None for a new training.
        logging_steps: steps between updates of trackers; the file has every step.

    Raises:
        ConfigError: a new training finds lines.
        DataError: a line is damaged.
        RunStopped: the file is not writable.
    """

    def __init__(
        self, folder: Path, *, trackers: Sequence[Tracker] = (), resume_step: int | None = None, logging_steps: int = 1
    ) -> None:
        self.path = Path(folder) / METRICS
        self._trackers = Trackers(trackers, self.path)
        self._logging_steps = logging_steps
        self.last_step = resume_step
        """Step of the last line; None before the first."""
        # A new folder has neither, also on resume, from checkpoints of another one.
        is_new = not self.path.exists() and not self.path.with_name(STEPS).exists()
        rows = read_metrics(folder)
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
        if resume_step is not None:
            cut_steps(self.path, resume_step)
        self.sync()

    def log(self, step: int, numbers: Mapping[str, float], warnings: Sequence[str] = ()) -> None:
        """Add the line of the next train step. Numbers that are not finite become null; without `warnings` no key.

        A tracker that fails causes one warning and is retried later.

        Raises:
            ValueError: the step is not the next one.
            RunStopped: the disk is full or fails; earlier lines are complete.
        """
        if "step" in numbers or step < 0 or (self.last_step is not None and step != self.last_step + 1):
            raise ValueError(
                f"Journal.log: expected the step after {self.last_step}, got {step} with {len(numbers)} numbers. "
                "Log every step once, in order."
            )
        last: dict[str, Any] = {"step": step, **finite(numbers)}
        if warnings:
            last["warnings"] = list(warnings)
        append_rows(self.path, [last])
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
        with stopping(self.path), replaced(self.path) as temporary, temporary.open("wb") as file:
            lines = self.path.read_bytes().splitlines(keepends=True)  # JSON has no other ends of lines
            if lines and json.loads(lines[-1])["step"] == last["step"]:  # it may have none: lines were lost
                del lines[-1]
            file.writelines([*lines, line_of(last)])
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.path.parent)
        self._last = last
        self._trackers.log(last["step"], numbers)

    def sync(self) -> None:
        """Sync all lines to disk. Call it before a checkpoint is written, so that a power cut leaves no gap.

        Raises:
            RunStopped: the disk fails.
        """
        with stopping(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Sync the file and close the trackers.

        Raises:
            RunStopped: the disk fails.
        """
        try:
            self.sync()
        finally:
            self._trackers.close()


def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Return the numbers for JSON: those that are not finite become None."""
    plain = {key: value if value is None or isinstance(value, int) else float(value) for key, value in numbers.items()}
    infinite = {key for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)}
    return plain | dict.fromkeys(infinite)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, without an incomplete last one; empty if the file is missing.

    Raises:
        DataError: a line is damaged, or repeats a step.
    """
    path, rows = Path(folder) / METRICS, list[dict[str, Any]]()
    for number, line, row in rows_of(path):
        if row is None or (rows and row["step"] <= rows[-1]["step"]):
            raise DataError(
                f"{path}: expected the numbers of a train step in line {number}, got {line[:60]!r}. "
                "Fix or remove the line."
            )
        rows.append(row)
    return rows
