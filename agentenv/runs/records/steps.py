"""`steps.jsonl` of a training: a line per train step or evaluation, with what is known of each of its episodes.

A step that is done again after a resume writes its line again; the last line of a kind and step counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv._util.disk import replaced, write_whole
from agentenv.errors import DataError, RunStopped
from agentenv.runs.metrics import Summary

STEPS = "steps.jsonl"
SCHEMA_VERSION = 1
EVAL_FIELDS = ("episode_id", "reward", "score", "stop_reason", "error", "action_tokens", "turns", "info")

TRAIN_FIELDS = (
    "episode_id", "reward", "score", "stop_reason", "error", "action_tokens", "turns", "kept", "advantages",
    "staleness_min", "staleness_max", "trained_tokens", "logprob_diff",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainedEpisode:
    """What a train step made of an episode."""

    advantages: tuple[float | None, ...] = ()
    """Of each turn, the mean over its sampled tokens; empty for an episode without a reward."""
    staleness_min: int | None = None
    staleness_max: int | None = None
    """By how many updates its sampled tokens are behind the weights."""
    trained_tokens: int = 0
    """Sampled tokens that the loss counts."""
    logprob_diff: float | None = None
    """Mean |learner's - engine's log-probability| over those tokens."""


@dataclass(frozen=True, slots=True)
class StepGroup:
    """A group that a train step learned from, or that was rejected since the step before."""

    group_id: str
    episodes: tuple[Summary, ...]
    rejected: str | None = None
    """Why: low, high, failed, stale; None for a group that was learned from."""


def train_row(
    step: int,
    groups: Sequence[StepGroup],
    trained: Mapping[str, TrainedEpisode],
    *,
    kept: Container[str],
    estimator: str,
    credit: str,
) -> dict[str, Any]:
    """Return the line of a train step; fields are `TRAIN_FIELDS`.

    Args:
        step: the train step, from 1; the weights before it have the version `step - 1`.
        groups: those that it learned from, and the rejected ones.
        trained: by episode id.
        kept: ids of episodes that are in trajectories.jsonl.
        estimator: --advantage_estimator.
        credit: --credit.
    """

    def facts(e: Summary) -> list[Any]:
        t = trained.get(e.episode_id, TrainedEpisode())
        stop = e.stop_reason.value if e.stop_reason else None
        known = [e.episode_id, e.reward, e.score, stop, e.error_kind, e.num_action_tokens, e.num_turns]
        learned = [list(t.advantages), t.staleness_min, t.staleness_max, t.trained_tokens, t.logprob_diff]
        return [*known, e.episode_id in kept, *learned]

    return {
        "v": SCHEMA_VERSION,
        "kind": "train",
        "step": step,
        "version": step - 1,
        "estimator": estimator,
        "credit": credit,
        "episode_fields": TRAIN_FIELDS,
        "groups": [
            {"group_id": group.group_id, "rejected": group.rejected, "episodes": [facts(e) for e in group.episodes]}
            for group in groups
        ],
    }


def evaluation_row(step: int, summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return the line of an evaluation at a train step, with all its episodes by task; fields are `EVAL_FIELDS`."""
    groups: dict[str, list[list[Any]]] = {}
    envs = {each.group_id: {"env": each.env} if each.env else {} for each in summaries}
    for each in summaries:
        stop = each.stop_reason.value if each.stop_reason else None
        facts = [each.episode_id, each.reward, each.score, stop, each.error_kind, each.num_action_tokens]
        groups.setdefault(each.group_id, []).append([*facts, each.num_turns, dict(each.info_last)])
    return {
        "v": SCHEMA_VERSION,
        "kind": "eval",
        "step": step,
        "episode_fields": EVAL_FIELDS,
        "groups": [{"group_id": key, **envs[key], "episodes": sorted(rows)} for key, rows in sorted(groups.items())],
    }


def append_step(folder: Path, row: Mapping[str, Any]) -> None:
    """Add a line to `steps.jsonl`; see `append_rows`."""
    append_rows(folder / STEPS, [row])


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add lines with one write.

    Raises:
        RunStopped: the disk is full or fails.
    """
    with stopping(path), path.open("ab", buffering=0) as file:
        write_whole(file.fileno(), b"".join(map(line_of, rows)))


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a line of a file that `append_rows` writes."""
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


@contextlib.contextmanager
def stopping(path: Path) -> Iterator[None]:
    """Raise RunStopped for an OSError of the block, which writes lines of `path`."""
    try:
        yield
    except OSError as error:
        raise RunStopped(
            f"{path}: expected to write a line, got {error}. Earlier lines are kept. Make room, then resume with "
            "--resume."
        ) from error


def rows_of(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield number, text and row of each whole line, and None for one without a train step; nothing without a file."""
    # Not splitlines: damaged bytes may contain other ends of lines.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        yield number, line, row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_steps(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Return the lines of a kind by train step, in order; without a line that is still being written.

    Raises:
        DataError: a line is damaged, or has another schema.
    """
    path, found = folder / STEPS, dict[int, dict[str, Any]]()
    for number, line, row in rows_of(path):
        if row is None or row.get("v") != SCHEMA_VERSION:
            raise DataError(
                f"{path}: expected a line of schema version {SCHEMA_VERSION}, got {line[:60]!r} in line {number}. "
                "Remove it."
            )
        if row.get("kind") == kind:
            found[row["step"]] = row
    return dict(sorted(found.items()))


def cut_steps(path: Path, step: int) -> None:
    """Remove the lines of later steps, and a torn last one, from a file: a training resumes from `step`.

    Raises:
        RunStopped: the disk is full or fails.
    """
    if not path.is_file():
        return
    with stopping(path), replaced(path) as temporary, path.open("rb") as file, temporary.open("wb") as kept:
        for line in file:
            try:
                is_later = int(json.loads(line)["step"]) > step
            except (KeyError, TypeError, ValueError):
                is_later = False  # damaged: it stays for readers to report
            if line.endswith(b"\n") and not is_later:
                kept.write(line)
