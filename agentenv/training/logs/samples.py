"""Episodes of a training that are kept: whole groups of a train step, and those of evaluations.

Those of evaluations are in `eval/`, a run directory whose ids name the train step, `task@step`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import pstdev
from typing import TYPE_CHECKING, TypeVar

from agentenv.core.trajectory import Group, Trajectory
from agentenv.core.types import Task
from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.runs.records.directory import RunWriter, read_config
from agentenv.runs.records.index import FIELDS, TRAJECTORIES, read_index
from agentenv.runs.records.steps import read_steps
from agentenv.runs.records.tokenizer import EVAL

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig

_Key = TypeVar("_Key")
_OFFSET, _LENGTH, _ID, _GROUP = (list(FIELDS).index(name) for name in ("offset", "length", "episode_id", "group_id"))


def groups_to_keep(groups: Sequence[Group], config: TrainConfig, step: int) -> list[Trajectory]:
    """Return the episodes of whole groups that --save_samples and --save_samples_by keep of a train step.

    Of as many groups as that number of episodes fills, at least one, `spread` takes half by the widest spread of
    rewards, and the others at random, both of the environments of a mixture in turn, with which the steps begin in
    turn; the choice depends on --seed and the step only.
    """
    num = len(groups) if config.save_samples_by == "all" else -(-config.save_samples // config.n)
    if not config.save_samples:
        return []
    order = list(range(len(groups)))
    if config.save_samples_by in ("spread", "random"):
        random.Random(f"{config.seed} {step}").shuffle(order)
    if config.save_samples_by == "spread":
        rewards = [[each.reward for each in group.trajectories if each.reward is not None] for group in groups]
        envs = {index: group.trajectories[0].task.env for index, group in enumerate(groups)}
        names = sorted({*envs.values()})
        turn, first = divmod(step, len(names))
        random.Random(f"{config.seed} {turn}").shuffle(names)  # one order may always miss what is in every other step
        names = names[first:] + names[:first]
        order.sort(key=lambda index: names.index(envs[index]))
        by_spread = sorted(order, key=lambda index: (names.index(envs[index]), -pstdev(rewards[index] or [0.0])))
        widest = _in_turn(by_spread, envs)[: -(-num // 2)]
        order = [*widest, *_in_turn([each for each in order if each not in widest], envs, widest)]
    return [trajectory for index in sorted(order[:num]) for trajectory in groups[index].trajectories]


def _in_turn(order: Sequence[_Key], names: Mapping[_Key, str], before: Sequence[_Key] = ()) -> list[_Key]:
    """Return `order` so that each name has one before any has two; those of `before` count."""
    num, ranks = Counter(names[each] for each in before), {}
    for each in order:
        ranks[each] = num[names[each]]
        num[names[each]] += 1
    return sorted(order, key=ranks.__getitem__)


def cut_samples(folder: Path) -> None:
    """Remove the episodes behind those of the steps in `steps.jsonl`: a training does the later steps again.

    All stay if no line of a step names one of them: a version without these lines wrote them, or the lines are damaged.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        rows = [
            dict(zip(line["episode_fields"], row, strict=True))
            for line in read_steps(folder, "train").values()
            for group in line["groups"]
            for row in group["episodes"]
        ]
        known = {row["episode_id"] for row in rows if row["kept"]}
    except (DataError, KeyError, TypeError, ValueError):
        return
    ends = [row[_OFFSET] + row[_LENGTH] for row in read_index(folder) if row[_ID] in known]
    if ends and max(ends) < (folder / TRAJECTORIES).stat().st_size:
        os.truncate(folder / TRAJECTORIES, max(ends))


def tasks_to_keep(sets: Mapping[str, Sequence[Task]], config: TrainConfig) -> frozenset[str]:
    """Return the ids of the held-out tasks whose episodes are kept, the same at each evaluation.

    These are as many as --save_samples episodes fill, of the sets in turn, at least one of each: the first with
    --save_samples_by first, all with `all`, otherwise a choice at random that depends on --seed only.
    """
    names = {task.task_id: name for name, tasks in sets.items() for task in tasks}
    ids = list(names)
    if not config.save_samples:
        return frozenset()
    if config.save_samples_by in ("spread", "random"):
        random.Random(config.seed).shuffle(ids)
    num = max(len(sets), -(-config.save_samples // config.eval_n_samples_per_prompt))
    return frozenset(ids if config.save_samples_by == "all" else _in_turn(ids, names)[:num])


def keep_evaluation(folder: Path, step: int, episodes: Sequence[Trajectory]) -> None:
    """Write episodes of an evaluation into `eval/` of a training's folder, in place of those of this step or a later.

    Raises:
        RunStopped: the disk is full or fails.
    """
    if not episodes:
        return
    config = read_config(folder)["config"]

    def at_step(trajectory: Trajectory) -> Trajectory:
        group = f"{trajectory.group_id}@{step}"
        own = trajectory.episode_id.removeprefix(trajectory.group_id)
        return replace(trajectory, group_id=group, episode_id=group + own)

    try:
        cut_evaluations(folder, step - 1)
        with RunWriter.open(folder / EVAL, config, resume=True, may_differ=list(config)) as writer:
            in_order = sorted(episodes, key=lambda each: each.episode_id)  # they come as they end
            writer.append_all([at_step(each) for each in in_order])
    except (ConfigError, OSError) as error:
        raise RunStopped(
            f"{folder / EVAL}: expected to write the episodes of an evaluation, got: {error} Then resume with --resume."
        ) from error


def cut_evaluations(folder: Path, step: int) -> None:
    """Remove the episodes of evaluations after a train step: a training resumes from there.

    Raises:
        OSError: the file cannot be written.
    """
    record = folder / EVAL / TRAJECTORIES
    if record.is_file():
        steps = [(row[_OFFSET], row[_GROUP].rpartition("@")[2]) for row in read_index(folder / EVAL)]
        if later := [offset for offset, text in steps if text.isdigit() and int(text) > step]:
            os.truncate(record, min(later))
