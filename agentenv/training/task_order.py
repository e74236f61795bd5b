"""The order of tasks in a training: environments by weight, and the tasks of each one pass after pass.

A curriculum is a function that changes the weights of a mixture's environments, from statistics of their groups.
"""

from __future__ import annotations

import math
import random
import statistics
import traceback
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from agentenv._util.suggest import did_you_mean
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.errors import ConfigError, RunStopped
from agentenv.rewards.loading import load_function

_NUM_RECENT = 256
"""Groups of each environment that a curriculum sees."""
_WINDOW = 64
"""Groups of each environment that `spread` looks at."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A finished group: the episodes of one task, also if dynamic filtering rejected it."""

    task_id: str
    reward: float | None
    """Mean over the episodes with a reward; None without one."""
    score: float | None
    spread: float | None
    """Population standard deviation of the rewards; None with fewer than two."""


@dataclass(frozen=True, slots=True)
class EnvStats:
    """What a curriculum knows about an environment."""

    weight: float
    """As the flags or the file say."""
    num_groups: int
    """Finished so far."""
    groups: Sequence[GroupStats]
    """The last 256 of them, the oldest first."""


class Curriculum(Protocol):
    """A function that weighs environments. It should depend on its argument alone: then a resumed training is exact."""

    def __call__(self, environments: Mapping[str, EnvStats]) -> Mapping[str, float]:
        """Return a weight >= 0 for each environment by its name, not all 0.

        It is called before the first groups are sampled, when there are none, and then before each train step.
        """


def spread(environments: Mapping[str, EnvStats]) -> dict[str, float]:
    """Return the weights times the share of the last 64 groups whose rewards differ, of which a policy can learn.

    Two imagined groups, one of each kind, keep a solved or hopeless environment from being left out forever.
    """
    weights = {}
    for name, env in environments.items():
        recent = [group.spread for group in env.groups[-_WINDOW:] if group.spread is not None]
        weights[name] = env.weight * (1 + sum(value > 0 for value in recent)) / (2 + len(recent))
    return weights


CURRICULA: Mapping[str, Curriculum] = {"spread": spread}
"""Curricula by name."""


def load_curriculum(spec: str) -> Curriculum:
    """Return the curriculum that a name, FILE.py:name or module:name names.

    Raises:
        ConfigError: there is none.
    """
    if spec in CURRICULA:
        return CURRICULA[spec]
    if ":" not in spec:
        advice = did_you_mean(spec, CURRICULA, "Check its name.")
        raise ConfigError(f"--curriculum: expected {', '.join(CURRICULA)} or FILE.py:name, got {spec!r}.{advice}")
    try:
        return load_function(spec)
    except ConfigError as error:
        raise ConfigError(f"--curriculum: {error}") from error


@dataclass(slots=True)
class CurriculumState:
    """Statistics of a mixture's environments, and the weights that its curriculum makes of them."""

    curriculum: Curriculum
    given: Mapping[str, float]
    """The weights of the flags."""
    num_groups: dict[str, int] = field(default_factory=dict)
    recent: dict[str, deque[GroupStats]] = field(default_factory=dict)
    _new: dict[int, tuple[str, GroupStats]] = field(default_factory=dict)  # since the last update, by number

    def observe(self, number: int, env: str, trajectories: Sequence[Trajectory]) -> None:
        """Count a group that is over, by its position in the order of admission."""
        rewards = [each.reward for each in trajectories if each.reward is not None]
        scores = [each.score for each in trajectories if each.score is not None]
        stats = GroupStats(
            trajectories[0].task.task_id,
            statistics.fmean(rewards) if rewards else None,
            statistics.fmean(scores) if scores else None,
            statistics.pstdev(rewards) if len(rewards) > 1 else None,
        )
        self._new[number] = (env, stats)

    def update(self) -> dict[str, float]:
        """Return new weights. Groups are counted in the order of admission, so that timing changes nothing.

        Raises:
            RunStopped: the curriculum raised an exception, or returned something else.
            ConfigError: it did so before the first group.
        """
        for _, (env, stats) in sorted(self._new.items()):
            self.num_groups[env] = self.num_groups.get(env, 0) + 1
            self.recent.setdefault(env, deque(maxlen=_NUM_RECENT)).append(stats)
        self._new.clear()
        environments = {
            name: EnvStats(weight, self.num_groups.get(name, 0), tuple(self.recent.get(name, ())))
            for name, weight in self.given.items()
        }
        kind: type[ConfigError | RunStopped] = ConfigError
        advice = "Fix the function: before the first step no environment has groups."
        if self.num_groups:
            kind, advice = RunStopped, "Fix the function, and continue with --resume."
        try:
            returned = self.curriculum(environments)
        except Exception as error:
            frame, told = traceback.extract_tb(error.__traceback__)[-1], str(error).removesuffix(".")
            raise kind(
                f"{frame.filename}:{frame.lineno}: expected weights of environments for --curriculum, got "
                f"{type(error).__name__}: {told}. {advice}"
            ) from error
        weights = dict(returned) if isinstance(returned, Mapping) else {}
        numbers = [value for value in weights.values() if isinstance(value, int | float) and 0 <= value < math.inf]
        if weights.keys() != self.given.keys() or len(numbers) < len(weights) or not any(numbers):
            raise kind(
                f"--curriculum: expected a number >= 0 for each of {', '.join(self.given)}, not all 0, got "
                f"{returned!r:.300}. {advice}"
            )
        return {name: float(value) for name, value in weights.items()}

    def state(self) -> dict[str, Any]:
        """Return numbers and texts for `load_state`."""
        return {
            "num_groups": dict(self.num_groups),
            "recent": {env: list(map(astuple, groups)) for env, groups in self.recent.items()},
            "new": [(number, env, *astuple(stats)) for number, (env, stats) in self._new.items()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self.num_groups = dict(state["num_groups"])
        self.recent = {
            env: deque((GroupStats(*row) for row in rows), maxlen=_NUM_RECENT) for env, rows in state["recent"].items()
        }
        self._new = {number: (env, GroupStats(*row)) for number, env, *row in state["new"]}


class TaskOrder:
    """The tasks of all groups, by number. Each pass over the tasks of an environment is shuffled differently.

    In a mixture the next group goes to the environment that lags furthest behind its share. So after any number of
    groups none is a whole group ahead of the shares that the weights asked for. Numbers are asked for in order.

    Args:
        tasks: at least one; in a mixture each names its environment.
        seed: of the shuffling.
        weights: of the environments of a mixture, by name. They count sampled groups, also those rejected later.
            Without any, all tasks are of one environment.
        curriculum: changes the weights, also before the first group.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        weights: Mapping[str, float] = MappingProxyType({}),
        curriculum: Curriculum | None = None,
    ) -> None:
        if not tasks:
            raise ConfigError("--data: expected at least one task, got none. Check the data.")
        self.seed = seed
        self.weights = dict(weights)
        """In force for the next group."""
        self._tasks: dict[str, list[Task]] = {}
        for task in tasks:
            self._tasks.setdefault(task.env if weights else "", []).append(task)
        self._curriculum = CurriculumState(curriculum, dict(weights)) if curriculum is not None and weights else None
        self._orders: dict[tuple[str, int], list[int]] = {}
        self._places: dict[int, tuple[str, int]] = {}  # environment and position of each group's task
        self._drawn = dict.fromkeys(weights, 0)
        self._lags = dict.fromkeys(weights, 0.0)  # groups by which each environment is behind its share

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the next groups by environment, in a mixture."""
        total = sum(self.weights.values())
        return {name: weight / total for name, weight in self.weights.items()}

    def task(self, number: int) -> Task:
        """Return the task of a group. From the second pass on, the pass is part of its id.

        Raises:
            ConfigError: the curriculum failed before the first group.
        """
        env, place = "", number
        if self.weights:
            if number not in self._places:
                if not any(self._drawn.values()):
                    self.update()
                for name, share in self.shares.items():
                    self._lags[name] += share
                env = max((name for name, weight in self.weights.items() if weight), key=self._lags.__getitem__)
                self._lags[env] -= 1.0
                self._places[number] = (env, self._drawn[env])
                self._drawn[env] += 1
            env, place = self._places[number]
        tasks = self._tasks[env]
        epoch, position = divmod(place, len(tasks))
        if (env, epoch) not in self._orders:
            order = list(range(len(tasks)))
            random.Random(f"{self.seed}/{epoch}{'/' if env else ''}{env}").shuffle(order)
            for old in [key for key in self._orders if key[0] == env and key[1] < epoch - 1]:
                del self._orders[old]
            self._orders[env, epoch] = order
        task = tasks[self._orders[env, epoch][position]]
        return replace(task, task_id=f"{task.task_id}@{epoch}") if epoch else task

    def observe(self, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Tell the curriculum about a group that is over."""
        if self._curriculum is not None:
            self._curriculum.observe(number, self._places[number][0], trajectories)

    def update(self) -> None:
        """Let the curriculum change the weights.

        Raises:
            RunStopped: it failed; ConfigError before the first group is over.
        """
        if self._curriculum is not None:
            self.weights = self._curriculum.update()

    def state(self, numbers: Collection[int]) -> dict[str, Any]:
        """Return the state for `load_state`, with the tasks of these groups; empty without a mixture."""
        if not self.weights:
            return {}
        return {
            "weights": dict(self.weights),
            "places": [(number, *self._places[number]) for number in sorted(numbers)],
            "drawn": dict(self._drawn),
            "lags": dict(self._lags),
            "curriculum": self._curriculum.state() if self._curriculum is not None else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        if not state:
            return
        self._places = {number: (env, place) for number, env, place in state["places"]}
        self._drawn, self._lags = dict(state["drawn"]), dict(state["lags"])
        if self._curriculum is not None:
            self.weights = dict(state["weights"])
            if state["curriculum"] is not None:
                self._curriculum.load_state(state["curriculum"])

    def forget(self, kept: Collection[int]) -> None:
        """Drop the places of all groups but these."""
        self._places = {number: self._places[number] for number in kept if number in self._places}
