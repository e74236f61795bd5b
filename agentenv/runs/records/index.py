"""The index of a record: `index.jsonl`, a short line for each line of `trajectories.jsonl`, for lists, filters, resume.

Its first line names the fields; each further line is the array of their values (docs/reference/run-directory.md). It is
a cache. `trajectories.jsonl` is the truth: a row holds for the line that begins at its offset and has its checksum.
`check` is the CRC-32 of the index up to it, so that the last one shows damage anywhere before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from agentenv._util.disk import write_whole
from agentenv.core.trajectory import NO_VERSION, Trajectory
from agentenv.core.types import StopReason, Task
from agentenv.errors import ConfigError, DataError
from agentenv.runs.metrics import Summary, summarize
from agentenv.runs.records.lines import crc_of, decode_episode, decode_line, encode_line, split_line
from agentenv.runs.records.scan import ReadReport, RecordLine, lines_that_count, read_line, scan

logger = logging.getLogger(__name__)

INDEX, TRAJECTORIES, LOCK = "index.jsonl", "trajectories.jsonl", ".lock"
_MAX_WRITE_S = 3600
"""Seconds after which no process writes to a temporary file any more."""

FIELDS = {
    "offset": "where its line begins in trajectories.jsonl, in bytes",
    "length": "bytes of the line, with its end",
    "episode_id": "the episode",
    "group_id": "shared by the episodes of a task",
    "attempt": "number of earlier attempts that failed",
    "reward": "sum over the turns; null if unknown",
    "score": "the last score of a turn, or null",
    "stop_reason": "why the episode ended",
    "error": "null, or what failed: `infra`, `env`, `contract` or `data`",
    "error_text": "class, message and place of the failure; empty without one",
    "turns": "number of turns",
    "segments": "number of segments",
    "prompt_tokens": "tokens before the first action of each segment",
    "action_tokens": "sampled tokens",
    "env_tokens": "tokens that the environment added after the first action",
    "input_tokens": "tokens sent to the engine: the whole prompt of every turn",
    "cached_tokens": "input tokens that the engine had cached",
    "mean_logprob": "mean log-probability of the sampled tokens whose value is finite; null without one",
    "min_logprob": "the lowest of them",
    "version_min": "oldest version of the weights that sampled a token; null without one",
    "version_max": "the newest",
    "finish": "a letter for each turn where it is known: s stop, l length, a abort, e error, r repetition",
    "bridges": "replies by how their tokens were joined to the action, and `cut`: those with a part left out",
    "refusals": "requests of an agent with its own loop that got no answer, by the code of the error",
    "refusal_reasons": "the error of the last such request of each code",
    "marks": "Markdown marks in the actions; 0 without a reward",
    "repeated_share": "share of word 4-grams of the actions that repeat others; 0 without a reward",
    "generate_s": "seconds in the engine",
    "step_s": "seconds in the environment's `step`",
    "wait_s": "seconds outside of turns",
    "began_s": "when this attempt started, in seconds since 1970, or null",
    "cost_usd": "dollars that it cost; null if unknown",
    "env": "the task's environment in a mixture",
    "info": "by key, the number of the last turn that has it, or [that number, sum over the turns] where they differ",
    "step_retries": "calls of `step` again in all attempts, after an InfraError that asks for it",
    "retried": "errors after which a step or the episode ran again, by class and cause",
    "failovers": "actions that an engine failed to sample before another one did",
    "isolation": "`isolation` of `StepResult.info`: the level of the sandbox; empty without one",
    "request_retries": "requests to a server that were sent again",
    "models": "actions by the model that a server of chat completions named",
    "uncounted": "actions whose tokens, or those of their prompt, the server did not count: the sums lack them",
    "tokens": "tokens of all segments; null if the server did not count those of the last turn",
    "rewards": "the reward of each turn; null if its step failed",
    "action_hash": "the same in episodes whose sampled tokens, or texts without tokens, are the same",
    "crc": "checksum of the episode, as its line has it",
    "check": "CRC-32 of index.jsonl up to the comma before this value",
}
"""The fields of a row, in order, and their meaning."""

HEADER = (
    json.dumps({"v": 1, "source": TRAJECTORIES, "fields": list(FIELDS)}, separators=(",", ":")).encode("ascii") + b"\n"
)
Row = list[Any]
"""The values of `FIELDS` but the last, `check`, which belongs to a file; rows that are read have it too."""

_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":")).encode
_STOP_REASONS = {reason.value: reason for reason in StopReason}
_ID, _CRC = (list(FIELDS).index(name) for name in ("episode_id", "crc"))


def make_row(trajectory: Trajectory, summary: Summary, offset: int, length: int, crc: str) -> Row:
    """Return the row of an episode, whose Summary is `summary`, and whose line in the record has this place and CRC."""
    e, turns = summary, trajectory.turns
    spans = [(trajectory.segments[turn.segment], turn.start, turn.end) for turn in turns if turn.end > turn.start]
    logprobs, versions, actions = array("f"), array("i"), array("i")
    for segment, start, end in spans:
        logprobs += segment.logprobs[start:end]
        versions += segment.policy_versions[start:end]
        actions += segment.token_ids[start:end]
    known: Sequence[float] = logprobs
    try:
        total = math.fsum(logprobs)
    except ValueError:  # both infinities
        total = math.nan
    if not math.isfinite(total):
        known = [each for each in logprobs if math.isfinite(each)]
        total = math.fsum(known)
    used = set(versions) - {NO_VERSION}  # few of them: their extremes are found faster than those of all
    said = actions.tobytes() if actions else "\0".join(turn.action for turn in turns).encode("utf-8", "surrogatepass")
    return [
        offset, length, e.episode_id, e.group_id, e.attempt, e.reward, e.score,
        None if e.stop_reason is None else e.stop_reason.value,
        e.error_kind,
        [] if e.error_kind is None else [e.error_type, e.error_message, e.error_place, e.error_cause],
        e.num_turns, len(trajectory.segments), e.num_prompt_tokens, e.num_action_tokens, e.num_observation_tokens,
        e.num_input_tokens, e.num_cached_tokens,
        round(total / len(known), 5) if known else None, round(min(known), 5) if known else None,
        min(used, default=None), max(used, default=None),
        "".join([turn.finish_reason[:1] for turn in turns]), dict(e.bridges), dict(e.refusals),
        dict(e.refusal_reasons), e.num_marks, e.repeated_share, e.generate_s, e.step_s, e.wait_s, trajectory.began_s,
        e.cost_usd, e.env,
        {key: last if last == e.info_sum[key] else [last, e.info_sum[key]] for key, last in e.info_last.items()},
        e.num_step_retries, dict(e.retried), e.num_failovers, e.isolation, e.num_request_retries, dict(e.models),
        e.num_uncounted, trajectory.num_tokens if trajectory.is_counted else None,
        [None if turn.result is None else turn.result.reward for turn in turns],
        hashlib.blake2b(said, digest_size=8).hexdigest(), crc,
    ]  # fmt: skip


def summary_of(row: Sequence[Any]) -> Summary:
    """Return the Summary of a row: what `summarize` returns for its episode."""
    (
        _, _, episode_id, group_id, attempt, reward, score, stop_reason, error_kind, error_text, num_turns, _,
        num_prompt, num_action, num_observation, num_input, num_cached, _, _, _, _, finish, bridges, refusals,
        refusal_reasons, num_marks, repeated_share, generate_s, step_s, wait_s, _, cost_usd, env, info,
        num_step_retries, retried, num_failovers, isolation, num_request_retries, models, num_uncounted, *_,
    ) = row  # fmt: skip
    last = total = info
    if list in map(type, info.values()):
        last = {key: value[0] if type(value) is list else value for key, value in info.items()}
        total = {key: value[1] if type(value) is list else value for key, value in info.items()}
    error_type, error_message, error_place, error_cause = (*error_text, "", "", "", "")[:4]
    return Summary(
        episode_id, group_id, attempt, reward, score, _STOP_REASONS.get(stop_reason),
        error_kind, error_type, error_message, error_place, num_turns, num_prompt, num_action, num_marks,
        repeated_share, num_observation, num_input, num_cached, bridges, refusals, generate_s, step_s, wait_s,
        last, total, cost_usd, env, finish.count("l"), num_step_retries,
        retried, num_failovers, isolation, num_request_retries, models, refusal_reasons,
        error_cause, num_uncounted,
    )  # fmt: skip


# --- bytes of an index ------------------------------------------------------------------------------------------------


def encode_row(row: Row, crc: int) -> bytes | None:
    """Return the line of a row behind an index with the CRC-32 `crc`; None if a number is not finite."""
    try:
        text = _encode(row[: _CRC + 1]).encode("ascii")[:-1]
    except ValueError:
        return None
    return b'%b,"%08x"]\n' % (text, zlib.crc32(text, crc))


def whole_part(data: bytes) -> bytes:
    """Return an index without a torn last line; empty if it is damaged or of another version."""
    data = data[: data.rfind(b"\n") + 1]
    if data == HEADER:
        return data
    checked = data[: -len(b',"01234567"]\n')]
    is_whole = data.startswith(HEADER) and data[len(checked) :] == b',"%08x"]\n' % zlib.crc32(checked)
    return data if is_whole else b""


def rows_of(data: bytes) -> Iterator[Row]:
    """Yield the rows of an index that `whole_part` returned; some thousand at a time are in memory."""
    begin = len(HEADER)
    while begin < len(data):
        end = data.find(b"\n", begin + (1 << 20))
        end = len(data) - 1 if end < 0 else end
        yield from json.loads(b"[%b]" % data[begin:end].replace(b"\n", b","))
        begin = end + 1


def stored_index(folder: Path) -> bytes:
    """Return what holds of the index in a folder; empty without one."""
    path = folder / INDEX
    try:
        return whole_part(path.read_bytes()) if path.is_file() else b""  # a pipe would be waited for
    except OSError:
        return b""


class IndexCompletion:
    """Completes a stored index with the rows that it lacks, and drops those that belong to no line.

    Args:
        file: the record.
        stored: the index, as `whole_part` returns it.
    """

    def __init__(self, file: BinaryIO, stored: bytes) -> None:
        self.data = bytearray(stored or HEADER)
        """The index."""
        self._file, self._stored = file, stored
        self._crc = zlib.crc32(self.data)

    def rows(self, lines: Sequence[RecordLine]) -> Iterator[tuple[RecordLine, Row]]:
        """Yield of all lines of the record those that count, with their rows; the index is complete at the end.

        Raises:
            DataError: a line that counts is not that of a trajectory.
        """
        counting = {line.offset for line in lines_that_count(lines)}
        stored, num_kept = rows_of(self._stored), 0
        row = next(stored, None)
        for line in lines:
            counts = line.offset in counting
            if row is not None and row[0] == line.offset and row[_CRC] == line.crc:
                if counts:
                    yield line, row
                row, num_kept = next(stored, None), num_kept + 1
                continue
            made = self._made(line, counts=counts)
            if made is None:
                continue
            if row is not None and encode_row(made, 0) is not None:
                self._cut(num_kept)
                row = None
            self._add(made)
            if counts:
                yield line, made
        if row is not None:
            self._cut(num_kept)

    def extend(self, lines: Iterable[RecordLine]) -> None:
        """Add rows of lines that follow those of the index."""
        for line in lines:
            made = self._made(line, counts=False)
            if made is not None:
                self._add(made)

    def _add(self, row: Row) -> None:
        line = encode_row(row, self._crc)
        if line is not None:
            self.data += line
            self._crc = zlib.crc32(line, self._crc)

    def _made(self, line: RecordLine, *, counts: bool) -> Row | None:
        try:
            trajectory = read_line(self._file, line)
        except DataError:
            if counts:
                raise
            return None
        return make_row(trajectory, summarize(trajectory), line.offset, line.length, line.crc)

    def _cut(self, num_kept: int) -> None:
        end = 0
        for _ in range(num_kept + 1):
            end = self.data.index(b"\n", end) + 1
        del self.data[end:]
        self._crc = zlib.crc32(self.data)


# --- episodes of other processes --------------------------------------------------------------------------------------


_KNOWN_FIELDS = frozenset(("task", "episode_id", "group_id", "attempt", "stop_reason", "error"))


def entry_of(trajectory: Trajectory) -> tuple[bytes, Row, Summary]:
    """Return an episode's line in the record, its row in the index of a record without another line, and its Summary.

    Raises:
        DataError: no record can hold it.
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
        own = {field.name for field in dataclasses.fields(Trajectory)} - _KNOWN_FIELDS
        if name not in own:
            raise AttributeError(f"{type(self).__name__}: expected a field, got {name!r}. Check the name.")
        whole = decode_episode(decode_line(self.line) or b"")
        for each in own:
            setattr(self, each, getattr(whole, each))
        return getattr(self, name)


# --- readers ----------------------------------------------------------------------------------------------------------


def read_index(path: str | Path) -> Iterator[Row]:
    """Return the rows of a run directory, of `run`, `train` or an evaluation, in the order of the record.

    Superseded rows are among them. Safe while a run writes. The stored index counts if its last row is that of a line
    of the record; rows that it lacks are computed. They are stored, in the directory or, if that cannot be written, in
    `~/.cache/agentenv/index`, unless a run is writing there. Damaged lines, and lines whose values are not those of a
    trajectory, have no row.

    Raises:
        ConfigError: no record is there.
        DataError: the record has another schema.
    """
    folder = Path(path)
    try:
        file = (folder / TRAJECTORIES).open("rb")
    except OSError as error:
        what = f"expected a run directory with {TRAJECTORIES}, got {error}. Check the path."
        raise ConfigError(f"{path}: {what}") from None
    with file:
        stored, end = rows_in_store(folder, file)
        completion = IndexCompletion(file, stored)
        completion.extend(scan(file, ReadReport(), start=end))
    data = bytes(completion.data)
    if data != stored:
        store_index(folder, data)
    return rows_of(data)


def row_line(line: bytes, offset: int, crc: int) -> bytes | None:
    """Return the row of a whole line of the record, as a line of an index; None if it is not an episode's.

    `crc` is the CRC-32 of the index before it.
    """
    try:
        parts = split_line(line)
        if parts is None:
            return None
        trajectory = decode_episode(line[parts.start : parts.end])
    except DataError:
        return None
    return encode_row(make_row(trajectory, summarize(trajectory), offset, len(line), parts.crc), crc)


def rows_in_store(folder: Path, file: BinaryIO) -> tuple[bytes, int]:
    """Return the stored index of a record, and the bytes of the record that it covers; b"" and 0 without one.

    `file` is the record of the directory `folder`.
    """
    for place in (folder, _cache_folder(folder)):
        stored = stored_index(place)
        if len(stored) <= len(HEADER):
            continue
        # Otherwise this library did not write its last row.
        with contextlib.suppress(LookupError, OSError, OverflowError, TypeError, ValueError):
            row = json.loads(stored[stored.rfind(b"\n", 0, -1) :])
            file.seek(row[0])
            line = file.read(row[1])
            parts = split_line(line)
            begin = b'{"episode_id":%b,' % json.dumps(row[_ID]).encode()
            if parts is not None and parts.crc == row[_CRC] and line.startswith(begin, parts.start):
                return stored, row[0] + row[1]
    return b"", 0


def _cache_folder(folder: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "agentenv" / "index" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()


def store_index(folder: Path, data: bytes) -> None:
    """Store an index beside its record, or in the cache; not while a run writes there."""
    try:
        with open(folder / LOCK, "ab", opener=_unlinked) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            _replace(folder / INDEX, data)
    except OSError:
        cache = _cache_folder(folder)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _replace(cache / INDEX, data)
        except OSError as error:
            logger.warning("%s: the index is not stored (%s); it is computed again next time", cache, error)


def _unlinked(path: str, flags: int) -> int:
    """Open a file of a folder that may be a stranger's: a link there leads nowhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=_unlinked) as file:
            file.write(data)
            now = os.fstat(file.fileno()).st_mtime
        for left in path.parent.glob(f".{path.name}.*.tmp"):
            with contextlib.suppress(OSError):
                if now - left.lstat().st_mtime > _MAX_WRITE_S:
                    left.unlink()  # of a process that was killed while it wrote
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


# --- the writer of a run ----------------------------------------------------------------------------------------------


class IndexWriter:
    """Appends rows to the index of a run directory, for the record's only writer; not thread-safe.

    Rows are written by `flush`, never synced: an index that lacks the last rows is completed when it is read. If the
    disk takes no row, a warning is logged, and no more rows are written.

    Args:
        folder: the run directory.
        data: what the index is to hold at first; `stored` of it is there.
        stored: what the file holds.
    """

    def __init__(self, folder: Path, data: bytes, stored: bytes) -> None:
        self._path = folder / INDEX
        self._crc = zlib.crc32(data)
        self._added = bytearray()
        self._fd = -1
        with self._stops_on_error():
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            num = len(stored) if data.startswith(stored) else 0
            if os.fstat(self._fd).st_size != num:
                os.ftruncate(self._fd, num)
            write_whole(self._fd, data[num:])

    def add(self, row: Row) -> None:
        """Add a row, which `flush` writes."""
        line = encode_row(row, self._crc) if self._fd >= 0 else None
        if line is not None:
            self._added += line
            self._crc = zlib.crc32(line, self._crc)

    def flush(self) -> None:
        """Write the rows that were added."""
        added, self._added = self._added, bytearray()
        if self._fd >= 0:
            with self._stops_on_error():
                write_whole(self._fd, added)

    def close(self) -> None:
        """Close the file; rows that were not flushed are dropped."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @contextlib.contextmanager
    def _stops_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("%s: no more rows are written (%s); readers complete the index", self._path, error)
            self.close()
