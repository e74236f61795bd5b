"""Bounds the time of an audit: policies whose steps take long come last, and what does not fit is left out."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

_OF_ONE_POLICY = 1 / 40
"""Part of the time after which a policy is slow, and is played after the others."""
SLOW_S = 1.0
"""Seconds of a step that is recorded as slow."""


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took long."""

    policy: str
    task_id: str
    action: str
    step_s: float


@dataclass(slots=True)
class Budget:
    """The time of an audit, and what was used of it; it changes while episodes run."""

    limit_s: float = math.inf
    """Seconds of the audit."""
    started_s: float = field(default_factory=time.perf_counter)
    used_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of steps, by the name of the policy."""
    slow: list[SlowStep] = field(default_factory=list)
    part: float = 1.0
    """Part of the time after which no further episode starts; later kinds of episodes have the rest."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Episodes that did not fit, by the name of the policy."""
    num_not_repeated: int = 0

    @property
    def num_left_out(self) -> int:
        """Episodes that did not fit."""
        return self.left_out.total()

    def add(self, policy: str, task_id: str, action: str, step_s: float) -> None:
        """Count a step; `policy` is a name/variant."""
        self.used_s[policy.partition("/")[0]] += step_s
        if step_s >= SLOW_S:
            self.slow.append(SlowStep(policy, task_id, action, step_s))

    def is_slow(self, name: str) -> bool:
        """Return True if a policy has used so much time that others come first."""
        return self.used_s[name] > _OF_ONE_POLICY * self.limit_s

    @property
    def left_s(self) -> float:
        """Seconds until no further step may run; negative after that."""
        return self.limit_s * self.part - (time.perf_counter() - self.started_s)

    @property
    def is_over(self) -> bool:
        """Whether no further episode may start."""
        return self.left_s < 0
