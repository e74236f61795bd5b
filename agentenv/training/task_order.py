"""The order of tasks in a training: environments by weight, and the tasks of each one pass after pass."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.training.curriculum import Curriculum, CurriculumState


class TaskOrder:
    """The tasks of all groups, by number. Each pass over the tasks of an environment is shuffled differently.

    In a mixture the next group goes to the environment that lags furthest behind its share. So after any number of
    groups none is a whole group ahead of the shares that the weights asked for. Numbers are asked for in order.

    Args:
        tasks: at least one; in a mixture each names its environment.
        seed: of the shuffling.
        weights: of the environments of a mixture, by name. Without any, all tasks are of one environment.
        curriculum: changes the weights.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        weights: Mapping[str, float] = MappingProxyType({}),
        curriculum: Curriculum | None = None,
    ) -> None:
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
        """Return the task of a group. From the second pass on, the pass is part of its id."""
        env, place = self._place(number) if self.weights else ("", number)
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

    def _place(self, number: int) -> tuple[str, int]:
        if number not in self._places:
            for name, share in self.shares.items():
                self._lags[name] += share
            env = max((name for name, weight in self.weights.items() if weight), key=self._lags.__getitem__)
            self._lags[env] -= 1.0
            self._places[number] = (env, self._drawn[env])
            self._drawn[env] += 1
        return self._places[number]

    def observe(self, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Tell the curriculum about a group that is over."""
        if self._curriculum is not None:
            self._curriculum.observe(number, self._places[number][0], trajectories)

    def update(self) -> None:
        """Let the curriculum change the weights.

        Raises:
            RunStopped: it failed.
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
