"""Count what judges were asked and what that cost; safe to add to from several threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from agentenv.core.arguments import number
from agentenv.errors import InfraError
from agentenv.rewards.grading import add_usage
from agentenv.rewards.judges.protocol import (
    JudgeMisaddressed,
    JudgeRefused,
    JudgeTimeout,
    JudgeTruncated,
    JudgeUnavailable,
    JudgeUnreadable,
)

_KINDS: Mapping[type[InfraError], str] = {
    JudgeUnavailable: "unavailable",
    JudgeTimeout: "timeouts",
    JudgeUnreadable: "unreadable",
    JudgeTruncated: "truncated",
    JudgeRefused: "refused",
    JudgeMisaddressed: "refused",
}
USAGE_PREFIX = "judge/"
_COUNTS = (
    "requests", "retries", "replies", "prompt_tokens", "completion_tokens", "uncounted", "cached", "shared", "unclear",
    "failures", *dict.fromkeys(_KINDS.values()),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens, in any currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError if a price is negative."""
        number("Price.prompt", self.prompt, low=0.0)
        number("Price.completion", self.completion, low=0.0)


class JudgeUsage:
    """The counts of one judge, or of several that share it.

    `requests` were sent, `retries` of them not for the first time; `replies` came, with `prompt_tokens` and
    `completion_tokens`, including replies that were cut off, which are paid for. For `uncounted` replies the server
    reported no tokens, so they are missing from the cost. `cached` replies came from the cache, `shared` ones from a
    concurrent request for the same reply. `unclear` replies, cached ones included, held no verdict. `failures` had no
    reply; by kind they are `unavailable`, `timeouts`, `unreadable`, `truncated` and `refused`.
    """

    def __init__(self, price: Price | None = None) -> None:
        self.price = price or Price()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._lock = threading.Lock()  # guards the counts: judges may be asked on loops in several threads

    def __getitem__(self, name: str) -> int:
        """Return one count."""
        with self._lock:
            return self._counts[name]

    def add(self, **counts: int) -> None:
        """Add to the counts, and, with the cost, to the usage of the caller; see `rewards.grading`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
        cost = self._cost(counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0))
        add_usage({f"{USAGE_PREFIX}{name}": count for name, count in counts.items()} | {f"{USAGE_PREFIX}cost": cost})

    def fail(self, error: InfraError) -> None:
        """Count a failure."""
        kind = _KINDS.get(type(error))
        self.add(failures=1, **({kind: 1} if kind else {}))

    @property
    def cost(self) -> float:
        """Cost of all tokens that servers reported, in the currency of the price."""
        with self._lock:
            prompt, completion = self._counts["prompt_tokens"], self._counts["completion_tokens"]
        return self._cost(prompt, completion)

    def _cost(self, prompt: int, completion: int) -> float:
        return (prompt * self.price.prompt + completion * self.price.completion) / 1e6

    def metrics(self, prefix: str = USAGE_PREFIX) -> dict[str, float]:
        """Return all counts and the cost, for logs; always with the same keys."""
        with self._lock:
            counts = dict(self._counts)
        return {f"{prefix}{name}": float(count) for name, count in counts.items()} | {f"{prefix}cost": self.cost}
