"""Define what a judge is, count what it costs, and tell several replies to equal messages apart: of votes, of retries.

Otherwise a cache would return the same reply to all votes, and would always return the one that cannot be read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from agentenv.core.arguments import number
from agentenv.core.types import Message
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.grading import add_usage

USAGE_PREFIX = "judge/"
JUDGE_COST = f"{USAGE_PREFIX}cost"
_COUNTS = (
    "requests", "retries", "replies", "prompt_tokens", "completion_tokens", "uncounted", "cached", "shared", "unclear",
    "failures", "unavailable", "timeouts", "unreadable", "truncated", "refused",
)  # fmt: skip


class JudgeFailure(InfraError):
    """The base of all of them."""

    count = ""
    """The count of JudgeUsage for this kind."""


class JudgeUnavailable(JudgeFailure):
    """The judge cannot be reached, or reports that it cannot answer now; a later retry may help."""

    count = "unavailable"


class JudgeTimeout(JudgeFailure):
    """The judge did not answer in time."""

    count = "timeouts"


class JudgeUnreadable(JudgeFailure):
    """The answer holds no reply: it is not JSON, too long, of another form, or empty."""

    count = "unreadable"


class JudgeTruncated(JudgeFailure):
    """The reply was cut off at its length limit: its end, with the verdict, is unknown."""

    count = "truncated"


class JudgeRefused(JudgeFailure):
    """The judge refuses these messages, or this client; a retry cannot help."""

    count = "refused"


class JudgeMisaddressed(JudgeRefused, ConfigError):
    """The address has no judge, or not for this key: every question will fail, so the run ends."""

    ends_run = True


class JudgeUnclear(JudgeFailure):
    """The judge replied without a clear verdict; or its votes, or those of two orders, do not agree on one."""


SEEDS_PER_VOTE = 1000
"""Difference between the seeds of one vote and the next."""


class Judge(Protocol):
    """A language model that replies; several tasks may ask it concurrently."""

    async def complete(self, messages: Sequence[Message]) -> str:
        """Return its reply to a conversation.

        Raises:
            InfraError: there is none.
        """


class ReplyIndex(NamedTuple):
    """Identifies one of the replies to equal messages."""

    vote: int = 0
    attempt: int = 0

    def seed(self, seed: int | None) -> int | None:
        """Return a seed for this reply, derived from that of the sampling; None if that has none."""
        return None if seed is None else seed + SEEDS_PER_VOTE * self.vote + self.attempt


@runtime_checkable
class IndexedJudge(Judge, Protocol):
    """A judge that tells the replies to equal messages apart; `complete` returns the first of them."""

    async def reply_at(self, messages: Sequence[Message], index: ReplyIndex) -> str:
        """Return the reply with this index.

        Raises:
            InfraError: there is none.
        """


# --- usage ------------------------------------------------------------------------------------------------------------


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
        return self._counts[name]

    def add(self, **counts: int) -> None:
        """Add to the counts, and, with the cost if there is a price, to the caller's usage; see `rewards.grading`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
        usage: dict[str, float] = {f"{USAGE_PREFIX}{name}": count for name, count in counts.items()}
        if self.price != Price():  # without a price the cost is unknown
            usage[JUDGE_COST] = self._cost(counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0))
        add_usage(usage)

    def fail(self, error: InfraError) -> None:
        """Count a failure."""
        self.add(failures=1)
        if isinstance(error, JudgeFailure) and error.count:
            self.add(**{error.count: 1})

    @property
    def cost(self) -> float:
        """Cost of all tokens that servers reported, in the currency of the price."""
        return self._cost(self._counts["prompt_tokens"], self._counts["completion_tokens"])

    def _cost(self, prompt: int, completion: int) -> float:
        return (prompt * self.price.prompt + completion * self.price.completion) / 1e6

    def metrics(self, prefix: str = USAGE_PREFIX) -> dict[str, float]:
        """Return all counts and the cost, for logs; always with the same keys."""
        counts = {f"{prefix}{name}": float(count) for name, count in self._counts.items()}  # always of the same names
        return counts | {f"{prefix}cost": self.cost}
