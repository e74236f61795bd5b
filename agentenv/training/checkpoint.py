"""Checkpoints of a training run. A folder is complete or absent, even if the process is killed while writing.

`step-00000012/` holds `state.pt` (for `torch.load(weights_only=True)`: model, optimizer, random states), `buffer.jsonl`
(episodes that wait to be trained on, in lines of a run directory) and `meta.json` with the size and checksum of both.
It is written under a temporary name, synced and renamed. A step that is saved again becomes `step-00000012.1/`, because
a folder cannot replace another in one move.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from agentenv._util.disk import sync_directory
from agentenv._util.version import __version__
from agentenv.core.trajectory import Trajectory
from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.runs.records.lines import MAX_LINE_BYTES, decode_episode, decode_line, encode_line

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Version of the format. Later versions are refused."""
STATE, BUFFER, META = "state.pt", "buffer.jsonl", "meta.json"

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_TEMPORARY = ".tmp-"
_CHUNK_BYTES = 1 << 22


class Checkpoints:
    """The checkpoints in `folder`. The newest `keep` are kept. Only one process may write.

    `facts` (JSON) identify the training; each checkpoint stores them, see `facts_of`.

    Example::

        checkpoints = Checkpoints(run / "checkpoints", keep=3)
        if (newest := checkpoints.newest()) is not None:
            step, state, trajectories = checkpoints.load(newest)
        checkpoints.save(step + 1, learner.state(), waiting)

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, folder: Path, *, keep: int, facts: Mapping[str, Any] | None = None) -> None:
        if keep < 1:
            raise ConfigError(f"--max_ckpt_num: expected at least 1, got {keep}. Keep one to resume from.")
        self.folder = Path(folder)
        self.keep = keep
        self._facts = dict(facts or {})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--ckpt_path: expected a writable folder, got {error}. Name another.") from error

    def save(self, step: int, state: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> Path:
        """Write a checkpoint, remove old ones, and return its folder.

        Raises:
            DataError: a trajectory cannot be stored.
            RunStopped: the disk is full or fails; earlier checkpoints are unchanged.
        """
        temporary, path = self.folder / f"{_TEMPORARY}{step}", self.folder / f"step-{step:08d}"
        try:
            for left in self.folder.glob(f"{_TEMPORARY}*"):  # by killed processes
                shutil.rmtree(left)
            if revisions := [revision for found, revision, _ in self._folders() if found == step]:
                path = path.with_name(f"{path.name}.{max(revisions) + 1}")
            temporary.mkdir()
            _write(temporary, {"step": step, "training": self._facts}, dict(state), trajectories)
            temporary.rename(path)
            sync_directory(self.folder)
        except OSError as error:
            raise RunStopped(
                f"{path}: expected to write a checkpoint, got {error}. Earlier ones are kept. Make room or lower "
                "--max_ckpt_num, then resume with --resume."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        try:
            # The one just saved stays, even if folders of later steps exist: of another run, or damaged.
            others = [each for _, _, each in sorted(self._folders(), reverse=True) if each != path]
            others = [each for each in others if _version(each) <= SCHEMA_VERSION]
            complete = [each for each in others if _problem(each, checksums=False) is None]
            for each in others:
                if each not in complete[: self.keep - 1]:
                    shutil.rmtree(each)  # an incomplete removal leaves a folder that `newest` skips
        except OSError as error:
            logger.warning("%s: could not remove old checkpoints: %s", self.folder, error)
        return path

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None. Damaged ones are skipped with a warning.

        Raises:
            ConfigError: a later version of agentenv wrote the newest one.
        """
        for _, _, path in sorted(self._folders(), reverse=True):
            if (version := _version(path)) > SCHEMA_VERSION:
                raise ConfigError(
                    f"{path}: expected a checkpoint of schema version up to {SCHEMA_VERSION}, got {version}. "
                    "Resume with the newer agentenv that wrote it."
                )
            problem = _problem(path, checksums=True)
            if problem is None:
                return path
            logger.warning("%s: skipped, %s", path, problem)
        return None

    def load(self, path: Path) -> tuple[int, dict[str, Any], list[Trajectory]]:
        """Return the step, state (tensors on the CPU) and waiting trajectories of a checkpoint that `newest` returned.

        Raises:
            DataError: the state is not only of tensors, numbers and text.
        """
        import torch

        try:
            state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise DataError(
                f"{path / STATE}: expected tensors and numbers only, got {error}. Resume from another one."
            ) from error
        trajectories: list[Trajectory] = []
        with (path / BUFFER).open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                trajectories.append(decode_episode(cast(bytes, decode_line(line))))  # not None: `newest` compared it
        return int(_read_meta(path)["step"]), state, trajectories

    @property
    def num_damaged(self) -> int:
        """Number of incomplete checkpoints, for example after a power cut."""
        return sum(_problem(path, checksums=True) is not None for _, _, path in self._folders())

    @staticmethod
    def facts_of(path: Path) -> dict[str, Any]:
        """Return the facts stored in a checkpoint."""
        return dict(_read_meta(path)["training"])

    @staticmethod
    def step_of(path: Path) -> int:
        """Return the step of a checkpoint from its folder's name."""
        match = _NAME.fullmatch(Path(path).name)
        if match is None:
            raise ConfigError(f"{path}: expected a folder named like step-00000012, got another. Check the path.")
        return int(match[1])

    def _folders(self) -> list[tuple[int, int, Path]]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        return [(int(match[1]), int(match[2] or 0), path) for match, path in matches if match]


class _ChecksumFile:
    """A file that counts and checksums what is written, and keeps the OSError that torch hides."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.crc = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write data."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is closed."""


@contextlib.contextmanager
def _counted(path: Path, entries: dict[str, dict[str, Any]]) -> Iterator[_ChecksumFile]:
    with path.open("wb") as file:
        counted = _ChecksumFile(file)
        yield counted
        file.flush()
        os.fsync(file.fileno())
    entries[path.name] = {"size": counted.size, "crc32": f"{counted.crc:08x}"}


def _write(folder: Path, head: dict[str, Any], state: dict[str, Any], trajectories: Sequence[Trajectory]) -> None:
    import torch

    entries: dict[str, dict[str, Any]] = {}
    with _counted(folder / STATE, entries) as file:
        try:
            torch.save(state, file)  # type: ignore[arg-type]
        except RuntimeError:
            if file.error is not None:
                raise file.error from None
            raise
    with _counted(folder / BUFFER, entries) as file:
        for trajectory in trajectories:
            file.write(encode_line(trajectory))
    meta = {
        "schema_version": SCHEMA_VERSION,
        **head,
        "num_trajectories": len(trajectories),
        "versions": {"agentenv": __version__, "torch": torch.__version__},
        "files": entries,
    }
    with (folder / META).open("w", encoding="ascii") as text:
        json.dump(meta, text, indent=2)
        text.flush()
        os.fsync(text.fileno())
    sync_directory(folder)


def _read_meta(path: Path) -> dict[str, Any]:
    # Empty if it cannot be read.
    try:
        meta = json.loads((path / META).read_bytes())
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def _version(path: Path) -> int:
    version = _read_meta(path).get("schema_version")
    return version if isinstance(version, int) else 0


def _problem(path: Path, *, checksums: bool) -> str | None:
    """Return what is wrong with a checkpoint, or None. Without checksums only sizes are compared."""
    meta = _read_meta(path)
    files = meta.get("files")
    if not isinstance(meta.get("step"), int) or not isinstance(files, dict) or {STATE, BUFFER} - files.keys():
        return f"{META} is missing or damaged"
    for name in (STATE, BUFFER):
        try:
            size, crc = (path / name).stat().st_size, 0
            with (path / name).open("rb") as file:
                while checksums and (chunk := file.read(_CHUNK_BYTES)):
                    crc = zlib.crc32(chunk, crc)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        crc32 = f"{crc:08x}" if checksums else files[name]["crc32"]
        if {"size": size, "crc32": crc32} != files[name]:
            return f"{name} is not what was written"
    return None
