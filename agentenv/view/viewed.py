"""The runs that a page shows: found once, from what the command names; their files are opened below their folders."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from agentenv._util.disk import open_plain
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records.tokenizer import EVAL, training_of
from agentenv.view.foreign import KINDS, convert, reader_of

CONFIG, TRAJECTORIES, METRICS, LOCK = "config.json", "trajectories.jsonl", "metrics.json", ".lock"
TRAIN_METRICS, STEPS, INDEX = "metrics.jsonl", "steps.jsonl", "index.jsonl"
_MAX_JSON_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ViewedRun:
    """A run directory, of `run` or `train`."""

    path: str
    """As the user named it."""
    name: str
    """Unique among the runs of a page."""
    folder: Path
    """Without links."""
    is_eval: bool = False
    """True for the episodes of a training's evaluations, which may not exist yet."""
    said: str = ""
    """Of another trainer's record: what was read, and what it lacks."""

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO | None]:
        """Open a file of the run for reading; None if there is none. A link is refused.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            file = open_plain(self.folder / name)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise DataError(f"{self.path}: expected to read {name}, got {error}. Links are not followed.") from error
        with file:
            yield file

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; 0 if there is none."""
        try:
            return os.stat(self.folder / name, follow_symlinks=False).st_size
        except OSError:
            return 0

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object of the run, with null for numbers that are not finite; None if there is none."""
        with self.open(name) as file:
            content = b"" if file is None else file.read(_MAX_JSON_BYTES)
        try:
            value = json.loads(content, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @property
    def training(self) -> ViewedRun:
        """The training of evaluations; else the run itself."""
        return replace(self, folder=self.folder.parent, is_eval=False) if self.is_eval else self

    @property
    def flags(self) -> Mapping[str, Any]:
        """The flags of the run; empty for one that other code recorded."""
        config = (self.training.read_json(CONFIG) or {}).get("config")
        flags = config.get("flags") if isinstance(config, dict) else None
        return flags if isinstance(flags, dict) else {}

    @property
    def kind(self) -> str:
        """`train` for a training, `eval` for its evaluations, else `run`."""
        if self.is_eval:
            return "eval"
        return "train" if "max_train_steps" in self.flags or self.size(TRAIN_METRICS) else "run"

    @property
    def has_episodes(self) -> bool:
        """True once an episode is in the record."""
        return self.size(TRAJECTORIES) > 0

    @property
    def is_writing(self) -> bool:
        """True while another process holds the run's lock, as far as this system tells."""
        # Taking the lock to find out would refuse a run that starts in this moment.
        try:
            inode = os.stat(self.folder / LOCK, follow_symlinks=False).st_ino
            locks = Path("/proc/locks").read_text(encoding="ascii")
        except (OSError, ValueError):
            return False
        rows = [line.split() for line in locks.splitlines()]
        return any("FLOCK" in row and any(cell.endswith(f":{inode}") for cell in row) for row in rows)


def _finite(text: str) -> float | None:
    """Return a number of JSON; None if it is one that browsers do not read."""
    value = float(text)
    return value if math.isfinite(value) else None


def find_runs(paths: Sequence[str]) -> list[ViewedRun]:
    """Return the runs at paths, each a run directory or a folder of them; the newest below `runs/` without paths.

    A record of another trainer becomes a run directory, which is removed at the end of the process.

    Raises:
        ConfigError: a path is not a run.
    """
    named: dict[Path, str] = {}  # folders without links, and how they were named
    foreign: dict[Path, tuple[Path, str]] = {}  # what they became
    for path in paths or ["runs"]:
        folder = Path(path)
        below = sorted(each for each in folder.iterdir() if _is_run(each)) if folder.is_dir() else []
        # Peers' folders have a config.json, too.
        is_own = any((each / TRAJECTORIES).exists() for each in (folder, *below))
        if not is_own and (reader := reader_of(folder)) is not None:
            if folder.resolve() not in named:
                foreign[folder.resolve()] = convert(folder, reader)
                named[folder.resolve()] = path
            continue
        found = [folder] if _is_run(folder) else below
        if not found:
            raise ConfigError(
                f"{path}: expected a run directory or a folder of runs, got neither. "
                f"Name the --out of an `agentenv run` or `agentenv train`, or one of {KINDS}."
            )
        if not paths:  # a training that was refused at its start left a run without content
            known = [ViewedRun(str(each), each.name, each) for each in found]
            full = [run.folder for run in known if run.has_episodes or run.size(TRAIN_METRICS) or run.is_writing]
            found = [max(full or found, key=lambda each: each.stat().st_mtime)]
        for each in found:
            named.setdefault(each.resolve(), str(each))
    times = Counter(folder.name for folder in named)
    runs = []
    for folder, path in named.items():
        if folder in foreign:
            made, said = foreign[folder]
            runs.append(ViewedRun(path, path if times[folder.name] > 1 else folder.name, made, said=said))
            continue
        training = training_of(folder)
        name = folder.name if training is None else f"{training.name}/{folder.name}"
        name = str(folder) if times[folder.name] > 1 else name
        runs.append(ViewedRun(path, name, folder, is_eval=training is not None))
    shown = {each.folder: each for run in runs for each in (run, *evaluations_of(run))}
    return list(shown.values())


def evaluations_of(run: ViewedRun) -> list[ViewedRun]:
    """Return the run of a training's evaluations, which may not have an episode yet; empty for other runs."""
    if run.kind != "train":
        return []
    return [ViewedRun(f"{run.path}/{EVAL}", f"{run.name}/{EVAL}", run.folder / EVAL, is_eval=True)]


def _is_run(folder: Path) -> bool:
    return (
        any((folder / name).is_file() for name in (CONFIG, TRAJECTORIES))
        and not (folder / "model.safetensors").exists()
    )
