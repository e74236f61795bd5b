"""The model with the best evaluation, `model-best`, and the end of a training that no longer improves."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentenv._util.disk import sync_directory, write_json
from agentenv._util.suggest import did_you_mean
from agentenv.errors import ConfigError, RunStopped

BEST, EVALUATION = "model-best", "evaluation.json"
_LATE = re.compile(r"(score|reward)(_ci95_(low|high))?|turns|truncated_share|(reward/|pass@|info/|stop/|set/).+")
"""Numbers that an evaluation may lack and a later one have."""
_TEMPORARY, _PREVIOUS = f".{BEST}.tmp", f".{BEST}.previous"


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """When --early_stop ends a training."""

    metric: str
    """A number of the evaluations, without `eval/`. More is better."""
    patience: int
    """Evaluations in a row that are not better than the best before them."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what METRIC:PATIENCE says.

        Raises:
            ConfigError: it has another form.
        """
        metric, _, patience = text.rpartition(":")
        if not metric or not patience.isdecimal() or int(patience) < 1:
            raise ConfigError(
                f"--early_stop: expected METRIC:PATIENCE with an integer >= 1, got {text!r}. "
                "Write, for example, score:3."
            )
        return cls(metric.removeprefix("eval/"), int(patience))


class BestModel:
    """Keeps the model with the best evaluation in `model-best`, which is complete or absent.

    The metric is that of --early_stop; without it the score, or the reward where episodes have no score.

    Args:
        folder: the training's folder.
        rows: the lines of its metrics.jsonl: a resumed training continues with their evaluations.
        early_stop: None never ends the training.
        note: called once, with a warning, if a new evaluation does not have the metric of --early_stop yet.
    """

    def __init__(
        self,
        folder: Path,
        rows: Sequence[Mapping[str, Any]] = (),
        early_stop: EarlyStop | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = folder / BEST
        self._early_stop = early_stop
        self._note: Callable[[str], None] | None = lambda text: None  # of the evaluations in `rows` it was told
        self._key = f"eval/{early_stop.metric}" if early_stop else ""
        self._values: list[tuple[int, float]] = []
        self._bar = float("-inf")
        temporary, previous = folder / _TEMPORARY, folder / _PREVIOUS
        if previous.exists() and not self.path.exists():  # killed between two renames
            previous.rename(self.path)
        for left in (temporary, previous):
            shutil.rmtree(left, ignore_errors=True)
        for row in rows:
            if any(key.startswith("eval/") for key in row):
                self.add(row["step"], row)
        self._note = note
        kept = self.evaluation
        if kept.get("metric") == self._key:  # a session that was killed may have evaluated more than the lines say
            self._bar = max(self._bar, kept["value"])

    @property
    def evaluation(self) -> dict[str, Any]:
        """The evaluation of the model in `model-best`: step, metric and value; empty without a model."""
        path = self.path / EVALUATION
        return dict(json.loads(path.read_bytes())) if path.is_file() else {}

    def add(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Take the evaluation of the model after a train step; return True if it is the one to save.

        The initial model is not: it is still where --model names it.

        Raises:
            ConfigError: --early_stop names a number that no evaluation has.
        """
        key = self._key or ("eval/score" if "eval/score" in numbers else "eval/reward")
        value = numbers.get(key)
        if value is None:
            if self._early_stop and not self._values and self._note is not None:
                metric = self._early_stop.metric
                known = sorted(key.removeprefix("eval/") for key in numbers if key.startswith("eval/"))
                short = [name for name in known if "/" not in name]  # those of a set have these names, too
                advice = did_you_mean(metric, known, f"There are {', '.join(short)}.", cutoff=0.7)
                wrong = f"--early_stop: expected a number of the evaluation, got {metric!r}.{advice}"
                if not _LATE.fullmatch(metric):
                    raise ConfigError(wrong)
                self._note(f"warning: {wrong} Until an evaluation has it, nothing stops the training early.")
                self._note = None
            if self._values:
                self._values.append((step, float("-inf")))
            return False
        self._key = key
        self._values.append((step, value))
        is_best = value > self._bar
        self._bar = max(value, self._bar)
        return is_best and step > 0

    @property
    def end_reason(self) -> str:
        """Why --early_stop ends the training now; "" if it does not."""
        if self._early_stop is None or not self._values:
            return ""
        step, best = max(self._values, key=lambda point: point[1])  # of equal ones the first
        num_since = sum(later > step for later, _ in self._values)
        if num_since < self._early_stop.patience:
            return ""
        return f"{self._key} was best at step {step}, with {best:.3f}, and {num_since} evaluations since are not better"

    def save(self, step: int, save_model: Callable[[Path], None]) -> None:
        """Replace the best model by that of the last evaluation; `save_model` writes it into a folder.

        Raises:
            RunStopped: the disk is full or fails; the earlier model is kept.
        """
        from safetensors import SafetensorError

        temporary, previous = self.path.with_name(_TEMPORARY), self.path.with_name(_PREVIOUS)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            save_model(temporary)
            write_json(temporary / EVALUATION, {"step": step, "metric": self._key, "value": self._bar})
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            if self.path.exists():
                self.path.rename(previous)
            temporary.rename(self.path)
            sync_directory(self.path.parent)
        except (OSError, SafetensorError) as error:
            raise RunStopped(
                f"{self.path}: expected to write the best model, got {error}. Make room, then resume with --resume."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if self.path.exists():
                shutil.rmtree(previous, ignore_errors=True)
