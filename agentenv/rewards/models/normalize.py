"""Rewards brought to a scale: by the mean and deviation of all so far, or by those of a calibration set.

Example:
    >>> reward = Normalized(ModelReward(HFScorer("my-rm")), half_life=2000, clip=5.0, calibration=[1.2, -0.4, 3.1])
    >>> (await reward.grade(response)).components["raw"]
    1.7

Estimators that compare within groups (group_norm, rloo, dr_grpo) take the group's mean off themselves: for them a
running scale changes how far rewards are apart, and nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.core.arguments import is_reward, number, one_of
from agentenv.errors import ConfigError
from agentenv.rewards.grading import patience_s
from agentenv.rewards.types import Response, Reward, RewardResult

KINDS = ("running", "fixed")
_ADDED = ("raw", "clipped")


class RunningNorm:
    """Mean and deviation of all numbers so far, by Welford's algorithm.

    Source: Welford 1962, doi:10.1080/00401706.1962.10490022.

    Args:
        half_life: after so many further numbers one counts half; None forgets nothing.
    """

    def __init__(self, *, half_life: float | None = None) -> None:
        self._kept = 1.0 if half_life is None else 0.5 ** (1.0 / number("RunningNorm.half_life", half_life, low=1.0))
        self.num, self.mean, self._weight, self._squares = 0, 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Of the numbers as the whole population; 0.0 for fewer than two."""
        return math.sqrt(self._squares / self._weight) if self.num else 0.0

    def update(self, value: float) -> None:
        """Take a number in."""
        self.num += 1
        self._weight = self._weight * self._kept + 1.0
        away = value - self.mean
        self.mean += away / self._weight
        self._squares = self._squares * self._kept + away * (value - self.mean)


class Normalized:
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
        is_reward("Normalized.reward", reward, "grade")
        self.reward: Reward = reward
        self._center = bool(center)
        self._running = one_of("Normalized.kind", kind, KINDS) == "running"
        self._clip = number("Normalized.clip", clip, low=1e-6)
        if not isinstance(calibration, list | tuple):
            raise ConfigError(f"Normalized.calibration: expected numbers, got {calibration!r:.200}. Pass a list.")
        self.norm = RunningNorm(half_life=half_life)
        """Of the rewards so far."""
        for value in calibration:
            self.norm.update(number("Normalized.calibration", value))
        if not self._running and not self.norm.std:
            raise ConfigError(
                "Normalized.calibration: expected at least two different rewards for kind 'fixed', got "
                f"{calibration!r:.200}. Grade some responses first."
            )
        self._lock = threading.Lock()  # guards the norm: event loops of several threads may share a reward

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

    async def grade(self, response: Response) -> RewardResult:
        """Return the result with the reward scaled; score, status and the rest are unchanged.

        Raises:
            DataError, InfraError: what the reward raises.
        """
        result = await self.reward.grade(response)
        if result.reward is None:
            return replace(result, components={**result.components, "raw": None, "clipped": None})
        with self._lock:
            if self._running:
                self.norm.update(result.reward)
            mean, std = self.norm.mean if self._center else 0.0, self.norm.std
        scaled = (result.reward - mean) / std if std else 0.0
        reward = min(max(scaled, -self._clip), self._clip)
        components = {**result.components, "raw": result.reward, "clipped": float(reward != scaled)}
        return replace(result, reward=reward, components=components)
