"""Curricula: functions that change the weights of a mixture's environments, from statistics of their groups."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

from agentenv._util.suggest import did_you_mean
from agentenv.core.trajectory import Trajectory
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
        """Return a weight >= 0 for each environment by its name, not all 0; called before each train step."""


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


def stats_of(trajectories: Sequence[Trajectory]) -> GroupStats:
    """Return the statistics of a group."""
    rewards = [each.reward for each in trajectories if each.reward is not None]
    scores = [each.score for each in trajectories if each.score is not None]
    return GroupStats(
        trajectories[0].task.task_id,
        statistics.fmean(rewards) if rewards else None,
        statistics.fmean(scores) if scores else None,
        statistics.pstdev(rewards) if len(rewards) > 1 else None,
    )


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
        self._new[number] = (env, stats_of(trajectories))

    def update(self) -> dict[str, float]:
        """Return new weights. Groups are counted in the order of admission, so that timing changes nothing.

        Raises:
            RunStopped: the curriculum raised an exception, or returned something else.
        """
        for _, (env, stats) in sorted(self._new.items()):
            self.num_groups[env] = self.num_groups.get(env, 0) + 1
            self.recent.setdefault(env, deque(maxlen=_NUM_RECENT)).append(stats)
        self._new.clear()
        environments = {
            name: EnvStats(weight, self.num_groups.get(name, 0), tuple(self.recent.get(name, ())))
            for name, weight in self.given.items()
        }
        advice = "Fix the function, and continue with --resume."
        try:
            weights = dict(self.curriculum(environments))
        except Exception as error:
            raise RunStopped(
                f"--curriculum: expected weights of environments, got {type(error).__name__}: {error}. {advice}"
            ) from error
        numbers = [value for value in weights.values() if isinstance(value, int | float) and 0 <= value < math.inf]
        if weights.keys() != self.given.keys() or len(numbers) < len(weights) or not any(numbers):
            raise RunStopped(
                f"--curriculum: expected a number >= 0 for each of {', '.join(self.given)}, not all 0, got "
                f"{weights!r:.300}. {advice}"
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
