"""The run directory: `config.json`, `trajectories.jsonl` (a line per finished episode) and `metrics.json`.

A line (`serialize.py`) is written with one call at the end of the file, so that neither a reader nor a killed run sees
half of it; a power cut or a full disk may tear the last one, which the next run cuts off. Broken lines are skipped and
counted, and their episodes count as not finished. Of several lines of one episode the first holds that did not fail, or
else the last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import platform
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import agentenv
from agentenv.errors import ConfigError, RunStopped
from agentenv.metrics import Summary, Tally, summarize
from agentenv.serialize import MAX_LINE_BYTES, SCHEMA_VERSION, decode_line, encode_line, jsonable, trajectory_from_dict
from agentenv.trajectory import Trajectory

logger = logging.getLogger(__name__)

CONFIG, TRAJECTORIES, METRICS, LOCK = "config.json", "trajectories.jsonl", "metrics.json", ".lock"

_SYNC_INTERVAL_S = 1.0
_KEY = re.compile(rb'\{"episode_id":("(?:[^"\\]|\\.)*"),"error":(null)?')
_fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has none


@dataclass(slots=True)
class ReadReport:
    """What a reader of `trajectories.jsonl` found."""

    num_lines: int = 0
    """Whole lines, superseded ones among them."""
    num_superseded: int = 0
    """Lines that do not count because of another line of the same episode."""
    corrupt_lines: list[int] = field(default_factory=list)
    """Numbers, from 1, of the lines that were skipped."""
    torn_bytes: int = 0
    """Bytes after the last whole line: torn, or being written just now."""


def read_trajectories(path: str | Path, *, report: ReadReport | None = None) -> Iterator[Trajectory]:
    """The trajectories of a run directory, or of one `.jsonl` file, in the order of the file; one at a time in memory.

    Safe while a run writes. Broken lines are skipped; a warning and `report`, filled before the first trajectory, tell.

    Raises:
        ConfigError: there is no such path.
        DataError: a line is of a newer schema.
    """
    report, file_path = report or ReadReport(), Path(path)
    if not file_path.exists():
        raise ConfigError(f"{path}: expected a run directory, got nothing. Check the path.")
    file_path = file_path / TRAJECTORIES if file_path.is_dir() else file_path
    if not file_path.exists():
        return
    with file_path.open("rb") as file:
        offsets = _scan(file, report)
        if report.corrupt_lines:
            logger.warning(
                "%s: skipped %d broken lines (%s); their episodes count as not finished",
                file_path, len(report.corrupt_lines), ", ".join(map(str, report.corrupt_lines[:10])),
            )  # fmt: skip
        for offset in sorted(offsets.values()):
            file.seek(offset)
            episode = decode_line(file.readline(MAX_LINE_BYTES))
            if episode is not None:
                yield trajectory_from_dict(json.loads(episode))


def _scan(file: BinaryIO, report: ReadReport) -> dict[bytes, int]:
    # Offsets of the lines that count, by the id as it is written. A second reading then needs one line in memory.
    best: dict[bytes, tuple[bool, int]] = {}  # has not failed, offset
    offset = number = 0
    while line := file.readline(MAX_LINE_BYTES):
        start, number = offset, number + 1
        offset += len(line)
        whole = line.endswith(b"\n")
        while not whole and (more := file.readline(MAX_LINE_BYTES)):
            offset, line, whole = offset + len(more), b"too long", more.endswith(b"\n")
        episode = decode_line(line)
        if episode is not None and (key := _KEY.match(episode)):
            report.num_lines += 1
            report.num_superseded += key[1] in best
            if key[1] not in best or not best[key[1]][0]:
                best[key[1]] = (key[2] is not None, start)
        elif not whole:
            report.torn_bytes = offset - start
        elif line.strip():
            report.corrupt_lines.append(number)
    return {key: start for key, (_, start) in best.items()}


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of a run directory's `config.json`: `schema_version`, `versions` and `config`.

    Raises:
        ConfigError: there is none, it is not agentenv's, or it is of a newer schema.
    """
    file_path = Path(path) / CONFIG
    try:
        document = json.loads(file_path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: expected a run directory, got no {CONFIG} in it. Check the path.") from None
    except ValueError as error:
        raise ConfigError(f"{file_path}: expected JSON, got {error}. Restore it, or use another --out.") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int) or not isinstance(document.get("config"), dict):
        raise ConfigError(f"{file_path}: expected the {CONFIG} of a run, got another file. Use another --out.")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{file_path}: expected schema version up to {SCHEMA_VERSION}, got {version}. "
            "Use the newer agentenv that wrote it, or another --out."
        )
    return dict(document)


class RunWriter:
    """Writes a run directory, alone in it, from any thread. A context manager; otherwise call `close`.

    Example::

        with RunWriter.open("runs/a", config, resume=True, may_differ=["concurrency"]) as writer:
            if episode_id not in writer.finished:
                writer.append(trajectory)
            writer.write_metrics(metrics.to_dict())
    """

    def __init__(self, path: Path, tally: Tally | None = None) -> None:
        self.path = path
        self.tally = tally if tally is not None else Tally()
        """All episodes in the file; `append` adds to it."""
        self.finished, self.failed = self.tally.finished, self.tally.failed
        """Ids that a resumed run need not repeat; by id, the Summary of those whose last attempt failed."""
        self.report = ReadReport()
        """What was found on opening."""
        self._guard = threading.Lock()  # the file's end, the tally, metrics.json's temporary name
        self._lock_fd = self._fd = -1
        self._size = 0
        self._torn = False
        self._synced_s = time.monotonic()

    @classmethod
    def open(
        cls, path: str | Path, config: Mapping[str, Any], *, resume: bool = False, may_differ: Collection[str] = (),
        tally: Tally | None = None, begun: bool = False,
    ) -> Self:  # fmt: skip
        """Start a run in `path`, or go on with the one that is there; a directory without an episode is started anew.

        `may_differ` are the keys of `config` (dotted for nested ones; a key stands for what is below it) that a resumed
        run may change. `tally`, an empty one, counts the episodes. With `begun` a run is there, whatever the episodes.

        Raises:
            ConfigError: another run writes there; there are episodes and `resume` is false; the configuration, but for
                `may_differ`, is another; the schema is newer; or the directory cannot be written.
            DataError: a line is of a newer schema.
        """
        writer = cls(Path(path), tally)
        # A forked child that outlives this process must not keep the lock.
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(writer)))
        try:
            writer.path.mkdir(parents=True, exist_ok=True)
            writer._lock()
            writer._begin(jsonable(config), resume, may_differ, begun=begun)
        except OSError as error:
            writer._close_files()
            what = f"expected a directory that can be written, got {error}. Mend it, or use another --out."
            raise ConfigError(f"{path}: {what}") from error
        except BaseException:
            writer._close_files()
            raise
        return writer

    def _lock(self) -> None:
        fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock_fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning("%s: no lock can be had (%s); see that no second run writes there", self.path, error)
                return
            holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            raise ConfigError(
                f"{self.path}: expected no other run, got one that is writing there (process {holder}). "
                "Wait for it, end it, or use another --out."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {platform.node()}\n".encode(), 0)

    def _begin(self, config: dict[str, Any], resume: bool, may_differ: Collection[str], *, begun: bool) -> None:
        log = self.path / TRAJECTORIES
        started = begun or (log.exists() and log.stat().st_size > 0)
        if started and not resume:
            raise ConfigError(
                f"{self.path}: expected an empty run directory, got one with episodes. "
                "Go on with it with --resume, or use another --out."
            )
        if started:
            _check_config(self.path, read_config(self.path)["config"], config, may_differ)
        else:
            if (self.path / CONFIG).exists():
                read_config(self.path)
            head = {"schema_version": SCHEMA_VERSION, "versions": _versions()}
            write_json(self.path / CONFIG, head | {"config": config})
        self._fd = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for trajectory in read_trajectories(self.path, report=self.report):
            self.tally.add(summarize(trajectory))
        self._mend_tail()
        os.fsync(self._fd)
        sync_directory(self.path)

    def _mend_tail(self) -> None:
        self._size = os.fstat(self._fd).st_size - self.report.torn_bytes
        if self.report.torn_bytes:
            logger.warning("%s: cut off a torn last line of %d bytes", self.path, self.report.torn_bytes)
            os.ftruncate(self._fd, self._size)
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._size += os.write(self._fd, b"\n")

    def append(self, trajectory: Trajectory) -> Summary:
        """Add the line of a finished episode; gives the Summary that holds for it.

        One that is there and has not failed stays: a result that comes twice, or late, changes nothing; nor does the
        failure of an earlier attempt. What is added survives a kill of the process; a power cut takes the last second
        at most.

        Raises:
            ValueError: the episode is not finished, has no id, or the writer is closed.
            DataError: the trajectory cannot be written; nothing is changed.
            RunStopped: the disk is full or fails; the earlier lines are whole, and `append` may be tried again.
        """
        if trajectory.stop_reason is None or not trajectory.episode_id:
            raise ValueError("RunWriter.append: expected a finished episode with an id, got another. Call `finish`.")
        with self._guard:
            if trajectory.episode_id in self.finished:
                return self._read(trajectory.episode_id)
            known = self.failed.get(trajectory.episode_id)
            if known is not None and trajectory.error is not None and trajectory.attempt < known.attempt:
                return known  # a resumed run counts its attempts on from the last one
            line, summary = encode_line(trajectory), summarize(trajectory)
            self._write(line)
            self.tally.add(summary)
            if time.monotonic() - self._synced_s >= _SYNC_INTERVAL_S:
                self._sync()
        return summary

    def _read(self, episode_id: str) -> Summary:
        # From the file: of an episode that is over nothing is kept, and that one comes twice is rare.
        with (self.path / TRAJECTORIES).open("rb") as file:
            file.seek(_scan(file, ReadReport())[json.dumps(episode_id).encode()])
            return summarize(trajectory_from_dict(json.loads(decode_line(file.readline(MAX_LINE_BYTES)) or b"")))

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            raise ValueError("RunWriter.append: expected an open writer, got a closed one. Append before `close`.")
        rest = memoryview(line)
        try:
            if self._torn:
                os.ftruncate(self._fd, self._size)
            self._torn = True
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                self._torn = False
            raise self._stopped(f"{len(line)} more bytes written", error) from error
        self._torn = False
        self._size += len(line)

    def _sync(self) -> None:
        self._synced_s = time.monotonic()
        try:
            _fdatasync(self._fd)
        except OSError as error:
            raise self._stopped("the file on the disk", error) from error

    def _stopped(self, expected: str, error: OSError) -> RunStopped:
        return RunStopped(
            f"{self.path}: expected {expected}, got {error}. The {len(self.tally)} episodes before are kept: "
            "make room, then go on with --resume."
        )

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Replace `metrics.json` in one step: a reader sees the old file or the new one.

        Raises:
            RunStopped: the disk is full or fails; the old file stays.
        """
        with self._guard:
            try:
                write_json(self.path / METRICS, jsonable(metrics))
            except OSError as error:
                raise self._stopped(f"{METRICS} written", error) from error

    def close(self) -> None:
        """Bring everything to the disk and give the directory free; further calls do nothing.

        Raises:
            RunStopped: the disk fails.
        """
        with self._guard:
            try:
                if self._fd >= 0:
                    self._sync()
            finally:
                self._close_files()

    def _close_files(self) -> None:
        fds, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _close_in_child(reference: weakref.ref[RunWriter]) -> None:
    writer = reference()
    if writer is not None:
        writer._close_files()


def _check_config(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], may_differ: Collection[str]) -> None:
    was, now = _flatten(old), _flatten(new)
    changed = [
        f"{key} was {was.get(key, 'absent')!r:.80}, is now {now.get(key, 'absent')!r:.80}"
        for key in [*was, *(key for key in now if key not in was)]
        if (key in was, was.get(key)) != (key in now, now.get(key))
        and not any(key == free or key.startswith(f"{free}.") for free in may_differ)
    ]
    if changed:
        more = [f"and {len(changed) - 8} more"] if len(changed) > 8 else []
        if any(key not in was for key in now):
            more.append("(a flag that was absent: another version of agentenv started this run)")
        raise ConfigError(
            f"{path}: expected the configuration that this run was started with, got changes: "
            f"{'; '.join(changed[:8] + more)}. Take them back, or start a new run with another --out."
        )


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}{key}.") if isinstance(item, Mapping) and item else {f"{prefix}{key}": item}
    return flat


def _versions() -> dict[str, str]:
    from importlib import metadata

    versions = {"agentenv": agentenv.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "openrlhf"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a file in one step, on the disk when this returns; raises OSError and leaves the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="ascii") as file:
            file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring a folder's entries to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
