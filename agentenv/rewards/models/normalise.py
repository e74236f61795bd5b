"""Rewards brought to a scale: by the mean and deviation of all so far, by those of a calibration set, or by each group.

Example:
    >>> reward = Normalised(ModelReward(HFScorer("my-rm")), half_life=2000, clip=5.0, calibration=[1.2, -0.4, 3.1])
    >>> (await reward.grade(response)).components["raw"]
    1.7

Estimators that compare within groups (group_norm, rloo, dr_grpo) take the group's mean off themselves: for them a
running scale changes how far rewards are apart, and nothing else; scaling by group is for those that do not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.core.arguments import is_reward, number, one_of, whole_number
from agentenv.errors import ConfigError
from agentenv.rewards.grading import patience_s
from agentenv.rewards.groups.statistics import summary
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult

KINDS = ("running", "fixed")
_ADDED = ("raw", "clipped")


class RunningNorm:
    """Mean and deviation of all numbers so far, by Welford's algorithm, and numbers scaled by them.

    Source: Welford 1962, doi:10.1080/00401706.1962.10490022; parts are joined as in Chan, Golub and LeVeque 1983.

    Args:
        epsilon: added to the deviation.
        clip: most that a scaled number may be away from zero.
        half_life: after so many further numbers one counts half; None forgets nothing.
    """

    def __init__(self, *, epsilon: float = 1e-6, clip: float | None = None, half_life: float | None = None) -> None:
        self._epsilon = number("RunningNorm.epsilon", epsilon, low=0.0)
        self._clip = None if clip is None else number("RunningNorm.clip", clip, low=0.0)
        kept = 1.0 if half_life is None else 0.5 ** (1.0 / number("RunningNorm.half_life", half_life, low=1.0))
        self._kept = kept
        self.num, self.mean, self._weight, self._squares = 0, 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Of the numbers as the whole population; 0.0 for fewer than two."""
        return math.sqrt(self._squares / self._weight) if self.num else 0.0

    def update(self, values: Sequence[float | None]) -> None:
        """Take numbers in."""
        for value in values:
            if value is not None:
                self.num += 1
                self._weight = self._weight * self._kept + 1.0
                away = value - self.mean
                self.mean += away / self._weight
                self._squares = self._squares * self._kept + away * (value - self.mean)

    def merge(self, other: RunningNorm) -> None:
        """Take in what another one has: the same as all of its numbers; none of either is forgotten for it."""
        if not other.num:
            return
        total, away = self._weight + other._weight, other.mean - self.mean
        self._squares += other._squares + away * away * self._weight * other._weight / total
        self.mean += away * other._weight / total
        self.num, self._weight = self.num + other.num, total

    def scaled(self, values: Sequence[float | None]) -> list[float | None]:
        """Each number as deviations from the mean; as it is, but clipped, before there are two numbers."""
        mean, std = (self.mean, self.std + self._epsilon) if self.num > 1 else (0.0, 1.0)
        return [
            None if value is None else _clipped((value - mean) / std if std else 0.0, self._clip) for value in values
        ]

    def state_dict(self) -> dict[str, float]:
        """Return the state for `load_state_dict`, as JSON."""
        return {"num": self.num, "mean": self.mean, "weight": self._weight, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the statistics by a stored state.

        Raises:
            ConfigError: the state is wrong.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            raise ConfigError(
                f"RunningNorm.state: expected {', '.join(self.state_dict())}, got {state!r:.200}. Fix it."
            )
        num = whole_number("RunningNorm.state.num", state["num"])
        mean = number("RunningNorm.state.mean", state["mean"])
        weight = number("RunningNorm.state.weight", state["weight"], low=0.0, high=float(num))
        squares = number("RunningNorm.state.squares", state["squares"], low=0.0, high=math.inf)
        if bool(num) is not bool(weight) or not math.isfinite(squares):
            raise ConfigError(f"RunningNorm.state: expected the state of a norm, got {state!r:.200}. Fix it.")
        self.num, self.mean, self._weight, self._squares = num, mean, weight, squares


def scaled_by_group(
    values: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    divide: bool = True,
    epsilon: float = 1e-6,
    clip: float | None = None,
) -> list[float | None]:
    """Each number less its group's mean and, with `divide`, by the group's deviation; 0.0 where all are the same.

    Raises:
        ConfigError: not one group per value.
    """
    if len(values) != len(groups):
        raise ConfigError(f"groups: expected one for each of {len(values)} values, got {len(groups)}. Pass them all.")
    members: dict[Hashable, list[tuple[int, float]]] = {}
    for place, (value, group) in enumerate(zip(values, groups, strict=True)):
        if value is not None:
            members.setdefault(group, []).append((place, value))
    scaled: list[float | None] = [None] * len(values)
    for known in members.values():
        figures = summary([value for _, value in known])
        for place, value in known:
            away = value - (figures.mean or 0.0)
            width = (figures.std or 0.0) + epsilon if divide else 1.0
            scaled[place] = _clipped(away / width if away else 0.0, clip)
    return scaled


def _clipped(value: float, clip: float | None) -> float:
    return value if clip is None else min(max(value, -clip), clip)


class _Scaled:
    """What rewards have in common that scale another's."""

    reward: Any
    _clip: float

    @property
    def bounds(self) -> tuple[float, float]:
        """`clip` to both sides."""
        return -self._clip, self._clip

    @property
    def patience_s(self) -> float:
        """The reward's own."""
        return patience_s(self.reward)

    @property
    def component_names(self) -> tuple[str, ...]:
        """What the reward declares, and `raw` and `clipped`."""
        return tuple(dict.fromkeys([*getattr(self.reward, "component_names", ()), *_ADDED]))

    def _replaced(self, result: RewardResult, wide: float | None) -> RewardResult:
        if wide is None:
            return replace(result, components={**result.components, "raw": None, "clipped": None})
        reward = _clipped(wide, self._clip)
        components = {**result.components, "raw": result.reward, "clipped": float(reward != wide)}
        return replace(result, reward=reward, components=components)


class Normalised(_Scaled):
    """A reward in deviations from a mean, clipped; both are those of the rewards so far, or of a calibration set.

    Args:
        reward: what is scaled, or settings for `registry.reward_from`.
        kind: `running` takes every reward in, then scales it; `fixed` is the calibration set's scale for good, the same
            for a response whenever it comes.
        half_life: of `running`: after so many further rewards one counts half, as a policy that learns has others.
        calibration: raw rewards to begin with, in the order in which they came; `fixed` needs two that differ.
        center: take the mean off; without, rewards keep their sign.
        clip: most that a reward may be away from zero.

    A response without a reward stays one, and enters no statistics. Until there are two different rewards every reward
    is 0. Components are those of `reward`, with `raw` before the scaling, and `clipped`, 0.0 or 1.0. What `running`
    gives depends on the order in which responses end: write `raw` down to compare runs.
    """

    def __init__(
        self,
        reward: Reward | str | Mapping[str, Any],
        *,
        kind: str = "running",
        half_life: float | None = None,
        calibration: Sequence[float] = (),
        center: bool = True,
        clip: float = 10.0,
    ) -> None:
        if isinstance(reward, str | Mapping):
            from agentenv.rewards.registry import reward_from

            reward = reward_from(reward)
        is_reward("Normalised.reward", reward, "grade")
        self.reward: Reward = reward
        self._center = bool(center)
        self._running = one_of("Normalised.kind", kind, KINDS) == "running"
        self._clip = number("Normalised.clip", clip, low=1e-6)
        if not isinstance(calibration, list | tuple):
            raise ConfigError(f"Normalised.calibration: expected numbers, got {calibration!r:.200}. Pass a list.")
        self.norm = RunningNorm(epsilon=0.0, half_life=half_life)
        """Of the rewards so far."""
        self.norm.update([number("Normalised.calibration", value) for value in calibration])
        if not self._running and not self.norm.std:
            raise ConfigError(
                "Normalised.calibration: expected at least two different rewards for kind 'fixed', got "
                f"{calibration!r:.200}. Grade some responses first."
            )
        self._lock = threading.Lock()  # guards the norm: event loops of several threads may share a reward

    async def grade(self, response: Response) -> RewardResult:
        """Return the result with the reward scaled; score, status and the rest are unchanged.

        Raises:
            DataError, InfraError: what the reward raises.
        """
        result = await self.reward.grade(response)
        if result.reward is None:
            return self._replaced(result, None)
        with self._lock:
            if self._running:
                self.norm.update([result.reward])
            mean, std = self.norm.mean if self._center else 0.0, self.norm.std
        return self._replaced(result, (result.reward - mean) / std if std else 0.0)

    def state_dict(self) -> dict[str, float]:
        """Return the statistics as JSON values, for a checkpoint."""
        with self._lock:
            return self.norm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the statistics of another session instead of the calibration's.

        Raises:
            ConfigError: the state is invalid.
        """
        with self._lock:
            self.norm.load_state_dict(state)


class NormalisedGroups(_Scaled):
    """A group reward less the group's mean and, with `divide`, in its deviations, clipped; 0 where all are the same.

    Responses without a reward have no part in mean and deviation. Components are as those of `Normalised`.
    """

    def __init__(self, reward: GroupReward, *, divide: bool = True, clip: float = 10.0) -> None:
        is_reward("NormalisedGroups.reward", reward, "grade_group")
        self.reward, self._divide = reward, bool(divide)
        self._clip = number("NormalisedGroups.clip", clip, low=1e-6)

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """One result per response, in order.

        Raises:
            DataError, InfraError: what the reward raises.
        """
        results = await self.reward.grade_group(responses, reference)
        scaled = scaled_by_group(
            [result.reward for result in results], [0] * len(results), divide=self._divide, epsilon=0.0
        )
        return [self._replaced(result, value) for result, value in zip(results, scaled, strict=True)]
