"""What judges were asked and what that cost: counts that only grow, safe to add to from several threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from agentenv.errors import InfraError
from agentenv.rewards._arguments import number
from agentenv.rewards.judges.failures import (
    JudgeMisaddressed,
    JudgeRefused,
    JudgeTimeout,
    JudgeTruncated,
    JudgeUnavailable,
    JudgeUnreadable,
)
from agentenv.rewards.spent import spend

_KINDS: Mapping[type[InfraError], str] = {
    JudgeUnavailable: "unavailable",
    JudgeTimeout: "timeouts",
    JudgeUnreadable: "unreadable",
    JudgeTruncated: "truncated",
    JudgeRefused: "refused",
    JudgeMisaddressed: "refused",
}
SPENT_PREFIX = "judge/"
_COUNTS = (
    "requests", "retries", "replies", "prompt_tokens", "completion_tokens", "uncounted", "cached", "shared", "unclear",
    "failures", *dict.fromkeys(_KINDS.values()),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens, in any currency; 0.0 for what costs nothing."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no price."""
        number("Price.prompt", self.prompt, low=0.0)
        number("Price.completion", self.completion, low=0.0)


class Usage:
    """The counts of one judge, or of several that share it.

    `requests` were sent, `retries` of them not for the first time; `replies` came, with `prompt_tokens` and
    `completion_tokens` together, those that were cut off included: they are paid for. Of `uncounted` replies the
    server told no tokens, so that they are missing from the cost. `cached` replies were had from the memory, `shared`
    ones together with somebody who asked the same at the same time. `unclear` replies held no verdict, those from the
    memory included. `failures` gave no reply; by kind they are `unavailable`, `timeouts`, `unreadable`, `truncated` and
    `refused`.
    """

    def __init__(self, price: Price | None = None) -> None:
        self.price = price or Price()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._lock = threading.Lock()  # guards the counts: judges may be asked on loops in several threads

    def __getitem__(self, name: str) -> int:
        """One count."""
        with self._lock:
            return self._counts[name]

    def add(self, **counts: int) -> None:
        """Add to counts, and to what the one who asks has spent, cost included."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
        cost = self._cost(counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0))
        spend({f"{SPENT_PREFIX}{name}": count for name, count in counts.items()} | {f"{SPENT_PREFIX}cost": cost})

    def fail(self, error: InfraError) -> None:
        """Count a failure."""
        kind = _KINDS.get(type(error))
        self.add(failures=1, **({kind: 1} if kind else {}))

    @property
    def cost(self) -> float:
        """Of all tokens that servers counted, in the currency of the price."""
        with self._lock:
            prompt, completion = self._counts["prompt_tokens"], self._counts["completion_tokens"]
        return self._cost(prompt, completion)

    def _cost(self, prompt: int, completion: int) -> float:
        return (prompt * self.price.prompt + completion * self.price.completion) / 1e6

    def metrics(self, prefix: str = SPENT_PREFIX) -> dict[str, float]:
        """All counts and the cost, for logs; always the same keys."""
        with self._lock:
            counts = dict(self._counts)
        return {f"{prefix}{name}": float(count) for name, count in counts.items()} | {f"{prefix}cost": self.cost}
