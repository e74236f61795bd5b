"""Choose the episodes of a train step that are kept in `trajectories.jsonl`: whole groups."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import pstdev
from typing import TYPE_CHECKING

from agentenv.core.trajectory import Group, Trajectory
from agentenv.errors import DataError
from agentenv.runs.metrics import Summary
from agentenv.runs.records.index import FIELDS, TRAJECTORIES, read_index
from agentenv.runs.records.steps import StepGroup, read_steps

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig

_OFFSET, _LENGTH, _ID = (list(FIELDS).index(name) for name in ("offset", "length", "episode_id"))


def groups_to_keep(groups: Sequence[Group], config: TrainConfig, step: int) -> list[Trajectory]:
    """Return the episodes of whole groups that --save_samples and --save_samples_by keep of a train step.

    Of as many groups as that number of episodes fills, at least one, `spread` takes half by the widest spread of
    rewards, and the others at random; the choice depends on --seed and the step only.
    """
    num = len(groups) if config.save_samples_by == "all" else -(-config.save_samples // config.n)
    if not config.save_samples:
        return []
    order = list(range(len(groups)))
    if config.save_samples_by in ("spread", "random"):
        random.Random(f"{config.seed} {step}").shuffle(order)
    if config.save_samples_by == "spread":
        widest = sorted(order, key=lambda index: -_spread(groups[index]))[: -(-num // 2)]
        order = [*widest, *(index for index in order if index not in widest)]
    return [trajectory for index in sorted(order[:num]) for trajectory in groups[index].trajectories]


def _spread(group: Group) -> float:
    rewards = [each.reward for each in group.trajectories if each.reward is not None]
    return pstdev(rewards) if rewards else 0.0


def step_groups(groups: Sequence[Group], summaries: Sequence[Summary]) -> list[StepGroup]:
    """Return the groups of a train step with the summaries of their episodes, which are in the same order."""
    left = iter(summaries)
    return [StepGroup(group.group_id, tuple(next(left) for _ in group.trajectories)) for group in groups]


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
