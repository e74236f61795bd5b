"""The run directory: `config.json`, `trajectories.jsonl` (a line per finished episode) and `metrics.json`.

A line (`lines.py`) is appended with one call, so that neither a reader nor a killed run sees half of it; a power cut or
a full disk may tear the last one, which the next run cuts off. Damaged lines are skipped and counted, and every reader
says so (`ReadReport.damage`); their episodes count as not finished. If an episode has several lines, the first one that
did not fail counts, otherwise the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import itertools
import json
import logging
import os
import platform
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Self, overload

from agentenv._util.disk import sync_directory, write_json, write_whole
from agentenv._util.jsonable import jsonable
from agentenv._util.version import __version__
from agentenv.core.trajectory import Trajectory
from agentenv.errors import ConfigError, RunStopped
from agentenv.runs.metrics import Summary, Tally, summarize
from agentenv.runs.records.index import (
    LOCK,
    TRAJECTORIES,
    IndexCompletion,
    IndexWriter,
    entry_of,
    store_index,
    stored_index,
    summary_of,
)
from agentenv.runs.records.lines import SCHEMA_VERSION
from agentenv.runs.records.scan import ReadReport, RecordLine, lines_that_count, read_line, scan
from agentenv.runs.records.tokenizer import TOKENIZER

logger = logging.getLogger(__name__)

CONFIG, METRICS = "config.json", "metrics.json"

_SYNC_INTERVAL_S = 1.0
_fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has none


def read_trajectories(path: str | Path, *, report: ReadReport | None = None) -> Iterator[Trajectory]:
    """Yield the trajectories of a run directory or a `.jsonl` file, in the order of the file, one at a time in memory.

    Safe while a run writes. Damaged lines are skipped and counted in `report`, which is filled before the first
    trajectory; without a `report` they are a UserWarning.

    Raises:
        ConfigError: the path does not exist.
        DataError: a line has another schema, or a whole line's values are not those of a trajectory.
    """
    found, file_path = report or ReadReport(), Path(path)
    if not file_path.exists():
        raise ConfigError(f"{path}: expected a run directory, got nothing. Check the path.")
    file_path = file_path / TRAJECTORIES if file_path.is_dir() else file_path
    if not file_path.exists():
        return
    with file_path.open("rb") as file:
        lines = lines_that_count(scan(file, found))
        if report is None and found.damage:
            warnings.warn(f"{file_path}: {found.damage}; their episodes count as not finished", stacklevel=2)
        for line in lines:
            yield read_line(file, line)


class RecordedEpisodes(Sequence[Trajectory]):
    """The episodes of a run directory that count, in the order of the record; each is read when it is first used.

    Damaged lines are counted in `report`; without one they are a UserWarning. `summaries` has what metrics need of each
    episode.

    Raises:
        DataError: a line has another schema, or its values are not those of a trajectory; when it is read, or here if
            the index has no row of it.
    """

    def __init__(self, path: Path, *, report: ReadReport | None = None) -> None:
        self._path = path / TRAJECTORIES
        self._lines: list[RecordLine] = []
        self.summaries: list[Summary] = []
        if self._path.exists():
            found, stored = report or ReadReport(), stored_index(path)
            with self._path.open("rb") as file:
                index = IndexCompletion(file, stored)
                lines = scan(file, found)
                if report is None and found.damage:
                    warnings.warn(f"{self._path}: {found.damage}; their episodes count as not finished", stacklevel=3)
                for line, row in index.rows(lines):
                    self._lines.append(line)
                    self.summaries.append(summary_of(row))
            if index.data != stored:
                store_index(path, bytes(index.data))
        self._episodes: list[Trajectory | None] = [None] * len(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Trajectory, ...]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | tuple[Trajectory, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        episode = self._episodes[index]
        if episode is None:
            episode = self._episodes[index] = self.read(index)
        return episode

    def read(self, index: int) -> Trajectory:
        """Return an episode, which is read again at its next use."""
        with self._path.open("rb") as file:
            return read_line(file, self._lines[index])


def check_run(path: str | Path) -> None:
    """Raise ConfigError if a path is neither a run directory nor a file."""
    if not Path(path).is_file() and not (Path(path) / TRAJECTORIES).exists():
        read_config(path)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the content of a run directory's `config.json`: `schema_version`, `versions` and `config`.

    Raises:
        ConfigError: the file is missing, is not from agentenv, or has another schema.
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
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{file_path}: expected schema version {SCHEMA_VERSION}, got {version}. "
            "Use the agentenv that wrote it, or another --out."
        )
    return dict(document)


def new_run_directory(name: str) -> Path:
    """Create `runs/NAME-TIME` and return it; with -2, -3 and so on if earlier ones began in the same second.

    Raises:
        ConfigError: it cannot be created.
    """
    path = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        Path("runs").mkdir(exist_ok=True)
        for number in itertools.count(1):
            free = Path(path if number == 1 else f"{path}-{number}")
            with contextlib.suppress(FileExistsError):
                free.mkdir()  # by one process only
                break
    except OSError as error:
        raise ConfigError(f"{path}: expected a writable directory, got {error}. Fix it, or use --out.") from error
    return free


class RunWriter:
    """The only writer of a run directory; may be called from any thread. Use it as a context manager, or call `close`.

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
        """Ids that a resumed run skips, and by id the Summary of each episode whose last attempt failed."""
        self.report = ReadReport()
        """Lines found when the directory was opened."""
        self._guard = threading.Lock()  # the file's end, the tally, metrics.json's temporary name
        self._lock_fd = self._fd = -1
        self._index: IndexWriter | None = None
        self._size = 0
        self._torn = False
        self._synced_s = time.monotonic()

    @classmethod
    def open(
        cls, path: str | Path, config: Mapping[str, Any], *, resume: bool = False, may_differ: Collection[str] = (),
        tally: Tally | None = None, is_started: bool = False,
    ) -> Self:  # fmt: skip
        """Start a run in `path`, or continue the run there; a directory without episodes counts as new.

        `may_differ` are the keys of `config` that a resumed run may change; a nested key is dotted, and a key includes
        the keys below it. `tally`, which must be empty, counts the episodes. `is_started` is True if `path` holds a
        run even without episodes.

        Raises:
            ConfigError: another run writes there; there are episodes and `resume` is False; the configuration differs
                in a key that is not in `may_differ`; the schema is another; or the directory is not writable.
            DataError: a line has another schema.
        """
        writer = cls(Path(path), tally)
        # A forked child that outlives this process must not keep the lock.
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(writer)))
        try:
            writer.path.mkdir(parents=True, exist_ok=True)
            writer._lock()
            writer._begin(jsonable(config), resume, may_differ, is_started=is_started)
        except OSError as error:
            writer._close_files()
            what = f"expected a writable directory, got {error}. Fix it, or use another --out."
            raise ConfigError(f"{path}: {what}") from error
        except BaseException:
            writer._close_files()
            raise
        return writer

    def _lock(self) -> None:
        fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock_fd = fd
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # It fails if a run has the lock, not if a reader that stores the index has it.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning(
                    "%s: the directory cannot be locked (%s). Make sure that no second run writes there",
                    self.path,
                    error,
                )
                return
            holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            raise ConfigError(
                f"{self.path}: expected no other run, got one that is writing there (process {holder}). "
                "Wait for it, end it, or use another --out."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {platform.node()}\n".encode(), 0)

    def _begin(self, config: dict[str, Any], resume: bool, may_differ: Collection[str], *, is_started: bool) -> None:
        log = self.path / TRAJECTORIES
        started = is_started or (log.exists() and log.stat().st_size > 0)
        if started and not resume:
            raise ConfigError(
                f"{self.path}: expected an empty run directory, got one with episodes. "
                "Continue that run with --resume, or use another --out."
            )
        if started:
            _check_config(self.path, read_config(self.path)["config"], config, may_differ)
        else:
            if (self.path / CONFIG).exists():
                read_config(self.path)
                shutil.rmtree(self.path / TOKENIZER, ignore_errors=True)  # of a start that failed, with another model
            versions = {"agentenv": __version__, "python": platform.python_version()}
            for name in ("torch", "transformers", "vllm", "openrlhf"):
                with contextlib.suppress(metadata.PackageNotFoundError):
                    versions[name] = metadata.version(name)
            head = {"schema_version": SCHEMA_VERSION, "versions": versions}
            write_json(self.path / CONFIG, head | {"config": config})
        self._fd = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with log.open("rb") as file:
            stored = stored_index(self.path)
            index = IndexCompletion(file, stored)
            for _, row in index.rows(scan(file, self.report)):
                self.tally.add(summary_of(row))
            self._index = IndexWriter(self.path, bytes(index.data), stored)
        self._size = os.fstat(self._fd).st_size - self.report.torn_bytes
        if self.report.torn_bytes:
            logger.warning("%s: cut off a torn last line of %d bytes", self.path, self.report.torn_bytes)
            os.ftruncate(self._fd, self._size)
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._size += os.write(self._fd, b"\n")
        os.fsync(self._fd)
        sync_directory(self.path)

    def append(self, trajectory: Trajectory) -> Summary:
        """Append a finished episode and return the Summary that counts for it; see `append_all`."""
        return self.append_all([trajectory])[0]

    def append_all(self, trajectories: Sequence[Trajectory]) -> list[Summary]:
        """Append finished episodes with one write, and return the Summary that counts for each.

        An episode that is in the file and did not fail stays: a second or late result changes nothing, nor does the
        failure of an earlier attempt. The line survives if the process is killed; a power cut loses at most the last
        second.

        Raises:
            ValueError: an episode is not finished, has no id, or the writer is closed.
            DataError: a trajectory cannot be written; nothing is changed.
            RunStopped: the disk is full or fails; the earlier lines are intact, and `append` may be retried.
        """
        if any(each.stop_reason is None or not each.episode_id for each in trajectories):
            raise ValueError("RunWriter.append: expected a finished episode with an id, got another. Call `finish`.")
        with self._guard:
            known = [self._known(trajectory) for trajectory in trajectories]
            new = [each for each, summary in zip(trajectories, known, strict=True) if summary is None]
            entries = [entry_of(each) for each in new]
            offset = self._size
            if entries:
                self._write(b"".join([line for line, _, _ in entries]))
            for line, row, summary in entries:
                self.tally.add(summary)
                if self._index is not None:
                    self._index.add([offset, *row[1:]])
                offset += len(line)
            if time.monotonic() - self._synced_s >= _SYNC_INTERVAL_S:
                self._sync()
        added = iter([summary for _, _, summary in entries])
        return [next(added) if summary is None else summary for summary in known]

    def _known(self, trajectory: Trajectory) -> Summary | None:
        """Return the Summary of an earlier line that counts instead of this episode."""
        if trajectory.episode_id in self.finished:
            # Read the file: finished episodes are not kept in memory, and a second result is rare.
            key = json.dumps(trajectory.episode_id).encode()
            with (self.path / TRAJECTORIES).open("rb") as file:
                found = next(line for line in lines_that_count(scan(file, ReadReport())) if line.key == key)
                return summarize(read_line(file, found))
        known = self.failed.get(trajectory.episode_id)
        # A resumed run continues the count of attempts.
        is_late = known is not None and trajectory.error is not None and trajectory.attempt < known.attempt
        return known if is_late else None

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            raise ValueError("RunWriter.append: expected an open writer, got a closed one. Append before `close`.")
        try:
            if self._torn:
                os.ftruncate(self._fd, self._size)
            self._torn = True
            write_whole(self._fd, line)
        except OSError as error:
            raise self._stopped(f"{len(line)} more bytes written", error) from error
        self._torn = False
        self._size += len(line)

    def _sync(self) -> None:
        self._synced_s = time.monotonic()
        if self._index is not None:
            self._index.flush()
        try:
            _fdatasync(self._fd)
        except OSError as error:
            raise self._stopped("the file on the disk", error) from error

    def _stopped(self, expected: str, error: OSError) -> RunStopped:
        return RunStopped(
            f"{self.path}: expected {expected}, got {error}. The {len(self.tally)} earlier episodes are kept. "
            "Make room, then continue with --resume."
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
        """Flush everything to the disk and release the directory; further calls do nothing.

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
        if self._index is not None:
            self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Outbox:
    """An async context manager around a RunWriter, which it closes.

    Example::

        async with Outbox(RunWriter.open(out, config)) as outbox:
            summary = await outbox.append(trajectory)
            await outbox.settle()
            await outbox.write_metrics(metrics)
    """

    def __init__(self, writer: RunWriter) -> None:
        self.writer = writer
        self._writing: set[asyncio.Future[Any]] = set()
        self._thread = ThreadPoolExecutor(1, "RunWriter")
        self._thread.submit(int)  # starts the thread: when the first episode ends, the system may have none left

    async def append(self, trajectory: Trajectory) -> Summary:
        """Store a finished episode; see `append_all`."""
        return (await self.append_all([trajectory]))[0]

    async def append_all(self, trajectories: Sequence[Trajectory]) -> list[Summary]:
        """Store finished episodes; when this returns, they are in the file.

        If this call is cancelled, the episodes are written nevertheless: `settle` waits for them.

        Raises:
            RunStopped, DataError, ValueError: as `RunWriter.append_all`.
        """
        summaries: list[Summary] = await self._in_thread(self.writer.append_all, trajectories)
        return summaries

    async def settle(self) -> None:
        """Wait until all episodes are written; `writer.tally` does not change afterwards."""
        while self._writing:
            await asyncio.wait(self._writing)

    async def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Replace `metrics.json`.

        Raises:
            RunStopped: the disk is full or fails.
        """
        await self._in_thread(self.writer.write_metrics, metrics)

    async def close(self) -> None:
        """Flush everything to the disk and close the writer.

        Raises:
            RunStopped: the disk fails.
        """
        await self.settle()
        await self._in_thread(self.writer.close)
        self._thread.shutdown()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        self._writing.add(work)
        work.add_done_callback(self._written)
        return await asyncio.shield(work)

    def _written(self, work: asyncio.Future[Any]) -> None:
        self._writing.discard(work)
        if not work.cancelled():
            work.exception()  # retrieved, since asyncio warns of an exception that a cancelled caller does not retrieve

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _close_in_child(reference: weakref.ref[RunWriter]) -> None:
    writer = reference()
    if writer is not None:
        writer._close_files()


def _check_config(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], may_differ: Collection[str]) -> None:
    """Raise ConfigError if a value differs; one that an older version did not know equals None."""
    was, now = _flatten(old), _flatten(new)
    changed = [
        f"{key} {describe_change(was.get(key, 'absent'), now.get(key, 'absent'))}"
        for key in [*was, *(key for key in now if key not in was)]
        if was.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in may_differ)
    ]
    if changed:
        more = [f"and {len(changed) - 8} more"] if len(changed) > 8 else []
        if any(key not in was for key in now):
            more.append("(a flag that was absent: another version of agentenv started this run)")
        raise ConfigError(
            f"{path}: expected the configuration that this run was started with, got changes: "
            f"{'; '.join(changed[:8] + more)}. Undo them, or start a new run with another --out."
        )


def describe_change(was: Any, now: Any) -> str:
    """Return the old and the new value of a flag in words; of entries, only those keys that differ."""
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = [(old, new) for old, new in zip(was, now, strict=True) if old != new]
        if pairs and all(isinstance(each, Mapping) for pair in pairs for each in pair):
            old, new = pairs[0]
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            was, now = ({key: each[key] for key in ("name", *keys) if key in each} for each in (old, new))
    return f"was {was!r:.80}, is now {now!r:.80}"


def _flatten(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with dotted keys; one level only, since deeper mappings are values of flags."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= {f"{key}.{name}": each for name, each in item.items()} if isinstance(item, Mapping) else {key: item}
    return flat
