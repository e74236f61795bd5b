"""Checkpoints of a training: folders that are whole or not there, whatever kills the process while one is written.

`step-00000012/` holds `state.pt` (what `torch.load(weights_only=True)` takes: model, optimiser, random numbers),
`buffer.jsonl` (episodes that wait to be trained on, lines as in a run directory) and `meta.json`, which knows the size
and checksum of both. It is written under a temporary name, brought to the disk and renamed. A step that is saved again
becomes `step-00000012.1/`, since one folder cannot take another's place in one move.
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
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import agentenv
from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.record import sync_directory
from agentenv.serialize import MAX_LINE_BYTES, decode_line, encode_line, trajectory_from_dict
from agentenv.trajectory import Trajectory

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Of a checkpoint; later ones are refused."""
STATE, BUFFER, META = "state.pt", "buffer.jsonl", "meta.json"

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_TEMPORARY = ".tmp-"
_CHUNK_BYTES = 1 << 22


class Checkpoints:
    """The checkpoints in `folder`, of which the newest `keep` are kept. One process writes there at a time.

    `facts`, as JSON has them, say what training they are of: each checkpoint holds them, see `facts_of`.

    Example::

        checkpoints = Checkpoints(run / "checkpoints", keep=3)
        if (newest := checkpoints.newest()) is not None:
            step, state, trajectories = checkpoints.load(newest)
        checkpoints.save(step + 1, learner.state(), waiting)

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int, facts: Mapping[str, Any] | None = None) -> None:
        if keep < 1:
            raise ConfigError(f"--max_ckpt_num: expected at least 1, got {keep}. Keep one to go on from.")
        self.folder, self.keep, self._facts = Path(folder), keep, dict(facts or {})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--ckpt_path: expected a folder that can be written, got {error}. Name another."
            ) from error

    def save(self, step: int, state: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> Path:
        """Write a checkpoint and give its folder; then remove what is older than the newest `keep`.

        Raises:
            TypeError: `state` holds what could not be loaded again; nothing is written.
            DataError: a trajectory cannot be stored.
            RunStopped: the disk is full or fails; the checkpoints before are untouched.
        """
        _check_storable(dict(state), "state")
        temporary, path = self.folder / f"{_TEMPORARY}{step}", self.folder / f"step-{step:08d}"
        try:
            self._clean()
            if revisions := [revision for found, revision, _ in self._found() if found == step]:
                path = path.with_name(f"{path.name}.{max(revisions) + 1}")
            temporary.mkdir()
            _write(temporary, {"step": step, "training": self._facts}, dict(state), trajectories)
            temporary.rename(path)
            sync_directory(self.folder)
        except OSError as error:
            raise RunStopped(
                f"{path}: expected a checkpoint written, got {error}. Those before are kept: make room, or lower "
                "--max_ckpt_num, then go on with --load_checkpoint."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        try:
            self._prune(path)
        except OSError as error:
            logger.warning("%s: old checkpoints stay: %s", self.folder, error)
        return path

    def newest(self) -> Path | None:
        """The newest whole checkpoint; None where there is none. What is torn is passed over, with a warning.

        Raises:
            ConfigError: the newest is of a later version of agentenv.
        """
        for _, _, path in sorted(self._found(), reverse=True):
            _check_schema(path)
            problem = _problem(path, checksums=True)
            if problem is None:
                return path
            logger.warning("%s: passed over, %s", path, problem)
        return None

    def load(self, path: Path) -> tuple[int, dict[str, Any], list[Trajectory]]:
        """The step, state (tensors on the CPU) and waiting trajectories of a checkpoint.

        Raises:
            ConfigError: there is none at `path`, or it is of a later version of agentenv.
            DataError: it is damaged.
        """
        import torch

        path = Path(path)
        if not path.is_dir():
            raise ConfigError(f"{path}: expected a checkpoint's folder, got none. Check the path.")
        _check_schema(path)
        if (problem := _problem(path, checksums=True)) is not None:
            raise DataError(f"{path}: expected a whole checkpoint, got one where {problem}. Go on from an earlier one.")
        try:
            state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise DataError(
                f"{path / STATE}: expected tensors and numbers only, got {error}. Go on without it."
            ) from error
        with (path / BUFFER).open("rb") as file:
            trajectories = [trajectory_from_dict(json.loads(episode)) for episode in _episodes(file)]
        return int(_read_meta(path)["step"]), state, trajectories

    @property
    def num_damaged(self) -> int:
        """Folders that are no whole checkpoint, as a power cut may leave them."""
        return sum(_problem(path, checksums=True) is not None for _, _, path in self._found())

    @staticmethod
    def facts_of(path: Path) -> dict[str, Any]:
        """What training a checkpoint is of, in the words of who wrote it; empty where that was an older agentenv."""
        facts = _read_meta(path).get("training")
        return facts if isinstance(facts, dict) else {}

    @staticmethod
    def step_of(path: Path) -> int:
        """The step of a checkpoint, by its folder's name."""
        match = _NAME.fullmatch(Path(path).name)
        if match is None:
            raise ConfigError(f"{path}: expected a folder named as step-00000012, got another. Check the path.")
        return int(match[1])

    def _found(self) -> list[tuple[int, int, Path]]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        return [(int(match[1]), int(match[2] or 0), path) for match, path in matches if match]

    def _clean(self) -> None:
        # What saves that were killed left behind.
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path)

    def _prune(self, saved: Path) -> None:
        # The one just saved stays, even where later steps lie about: of another run, or damaged.
        others = [path for _, _, path in sorted(self._found(), reverse=True) if path != saved]
        others = [path for path in others if _version(path) <= SCHEMA_VERSION]
        whole = [path for path in others if _problem(path, checksums=False) is None]
        for path in others:
            if path not in whole[: self.keep - 1]:
                shutil.rmtree(path)  # torn, until it is gone: passed over


class _Counted:
    """A file that counts what is written to it, and keeps the error that torch turns into one of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.crc = file, 0, 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all of it."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)
        return len(data)

    def flush(self) -> None:
        """Nothing: the file is flushed when it is closed."""


@contextlib.contextmanager
def _counted(path: Path, entries: dict[str, dict[str, Any]]) -> Iterator[_Counted]:
    with path.open("wb") as file:
        counted = _Counted(file)
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
        "versions": {"agentenv": agentenv.__version__, "torch": torch.__version__},
        "files": entries,
    }
    with (folder / META).open("w", encoding="ascii") as text:
        json.dump(meta, text, indent=2)
        text.flush()
        os.fsync(text.fileno())
    sync_directory(folder)


def _read_meta(path: Path) -> dict[str, Any]:
    # Empty where there is none that can be read.
    try:
        meta = json.loads((path / META).read_bytes())
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def _version(path: Path) -> int:
    version = _read_meta(path).get("schema_version")
    return version if isinstance(version, int) else 0


def _check_schema(path: Path) -> None:
    if (version := _version(path)) > SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: expected a checkpoint of schema version up to {SCHEMA_VERSION}, got {version}. "
            "Go on with the newer agentenv that wrote it."
        )


def _problem(path: Path, *, checksums: bool) -> str | None:
    """What is wrong with a checkpoint; None where it is whole. Without checksums only sizes are compared."""
    meta = _read_meta(path)
    files = meta.get("files")
    if not isinstance(meta.get("step"), int) or not isinstance(files, dict) or {STATE, BUFFER} - files.keys():
        return f"{META} is missing or damaged"
    for name in (STATE, BUFFER):
        try:
            size, crc = (path / name).stat().st_size, _crc32(path / name) if checksums else files[name]["crc32"]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if {"size": size, "crc32": crc} != files[name]:
            return f"{name} is not what was written"
    return None


def _crc32(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def _episodes(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES):
        episode = decode_line(line)
        if episode is None:
            raise DataError(f"{BUFFER}: expected lines of episodes, got {line[:60]!r}. Go on from an earlier one.")
        yield episode


def _check_storable(value: Any, where: str) -> None:
    # Found now, and not when the training is to go on: torch.load(weights_only=True) takes little else.
    import torch

    if type(value) in (dict, OrderedDict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _check_storable(key, f"the keys of {where}")
            _check_storable(item, f"{where}[{key!r}]")
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, int, float, str, bool, bytes, type(None)):
        raise TypeError(
            f"{where}: expected numbers, text, tensors, dicts and lists, got {type(value).__name__}. "
            "Convert it: what a checkpoint holds is loaded with weights_only=True."
        )
