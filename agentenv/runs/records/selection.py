"""Choose episodes of a run: those that failed, of a task, that a filter or a text keeps, the best or the worst."""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv._util.suggest import did_you_mean
from agentenv.core.trajectory import Trajectory
from agentenv.errors import ConfigError
from agentenv.runs.records.directory import read_trajectories
from agentenv.runs.records.filters import GROUP_COLUMNS, EpisodeFilter, conversation_texts
from agentenv.runs.records.scan import ReadReport
from agentenv.runs.records.tables import episode_row, turn_rows
from agentenv.runs.records.tokenizer import training_of


@dataclass(frozen=True, slots=True)
class Selection:
    """The episodes to read; everything that is set must hold."""

    failed: bool = False
    task: str | None = None
    """The id of a task, with or without the pass or the step of an evaluation (`ID@2`), or its number in a file without
    ids."""
    where: EpisodeFilter | None = None
    grep: re.Pattern[str] | None = None
    """Found in the prompt, an action or an observation."""
    worst: int | None = None
    """Of what is left, so many episodes with the lowest rewards."""
    best: int | None = None


def select(
    run: str | Path, selection: Selection, *, report: ReadReport | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[Trajectory]:
    """Yield the chosen episodes in the order of the record, the worst or the best from the extreme on.

    One trajectory at a time is in memory, or as many as `worst` or `best` asks for. `check` is called
    for each that is read, chosen or not, and may raise an error to end the search.

    Raises:
        ConfigError: the run or the task is missing, or no episode has a value that the filter names.
        DataError: the record has another schema.
    """
    chosen = _chosen(run, selection, report, check)
    if selection.worst is None and selection.best is None:
        yield from chosen
        return
    rewarded = ((each.reward, number, each) for number, each in enumerate(chosen) if each.reward is not None)
    if selection.worst is not None:
        ordered = heapq.nsmallest(selection.worst, rewarded, key=lambda item: item[:2])
    else:
        ordered = heapq.nsmallest(selection.best or 0, rewarded, key=lambda item: (-item[0], item[1]))
    yield from (trajectory for _, _, trajectory in ordered)


def _chosen(
    run: str | Path, selection: Selection, report: ReadReport | None, check: Callable[[], None]
) -> Iterator[Trajectory]:
    where, tasks = selection.where, set[tuple[str, str]]()
    rewards: Mapping[str, Sequence[float]] = {}
    if where and where.columns & set(GROUP_COLUMNS):
        rewards = rewards_of_groups(read_trajectories(run, report=ReadReport()), check)
    unseen = {column for column in where.columns if "info." in column} if where else set()
    seen: set[str] = set()
    for trajectory in read_trajectories(run, report=report):
        check()
        if unseen:
            seen.update(key for key in episode_row(trajectory) if key.startswith("info."))
            seen.update(f"turn.{key}" for row in turn_rows(trajectory) for key in row if key.startswith("info."))
            unseen -= seen
        if selection.task is not None:
            tasks.add((trajectory.task.task_id, trajectory.group_id))
        if (
            (not selection.failed or trajectory.error is not None)
            and (selection.task is None or _is_task(selection.task, trajectory.task.task_id, trajectory.group_id))
            and (where is None or where.matches(trajectory, rewards.get(trajectory.group_id, ())))
            and (selection.grep is None or any(map(selection.grep.search, conversation_texts(trajectory))))
        ):
            yield trajectory
    if tasks and not any(_is_task(str(selection.task), *ids) for ids in tasks):
        known = {each for ids in tasks for each in ids}
        advice = did_you_mean(str(selection.task), known, f"The first is {min(known)!r}.")
        folder = Path(run)
        if ((training_of(folder) or folder) / "metrics.jsonl").is_file():
            advice += " A training keeps as many episodes of a step or an evaluation as --save_samples says."
        raise ConfigError(f"--task: expected the id of a task of {run}, got {selection.task!r}.{advice}")
    if unseen and seen:
        column = min(unseen)
        advice = did_you_mean(column, seen, f"There are {', '.join(sorted(seen)[:8])}.")
        raise ConfigError(f"--where: expected a key of info that an episode has, got {column!r}.{advice}")


def _is_task(wanted: str, task_id: str, group_id: str) -> bool:
    first = task_id.partition("@")[0]
    return wanted in (task_id, first, group_id) or (wanted.isdigit() and wanted.zfill(6) == first)


def rewards_of_groups(
    trajectories: Iterable[Trajectory], check: Callable[[], None] = lambda: None
) -> defaultdict[str, list[float]]:
    """Return the rewards that the episodes of each group have; `check` is as of `select`."""
    rewards = defaultdict[str, list[float]](list)
    for trajectory in trajectories:
        check()
        if trajectory.reward is not None:
            rewards[trajectory.group_id].append(trajectory.reward)
    return rewards
