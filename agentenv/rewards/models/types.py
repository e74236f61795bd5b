"""The interface of reward models, one raw score per conversation or an error for it alone, and their base class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from agentenv.core.types import Message
from agentenv.errors import AgentEnvError, InfraError

Conversation = str | Sequence[Message]
"""Messages, which the reward model's tokenizer renders with its own template, or text, which is used unchanged."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The score of one conversation."""

    value: float
    """Raw output of the model's head, without activation, shift, scale or clipping. Finite."""
    num_tokens: int | None = None
    """Number of scored tokens; None if the server does not report it."""
    truncated: bool = False
    """Whether the conversation was too long and was cut."""
    score: float | None = None
    """The score that a function gives besides; None if it has no other than `value`."""
    logs: Mapping[str, Any] = field(default_factory=dict)
    """The function's own logs."""


class RewardScorer(Protocol):
    """A reward model. Callers score many conversations concurrently; it forms the batches itself."""

    async def score(self, conversation: Conversation) -> Scored:
        """Return the score of one conversation, without blocking the event loop; an error concerns this one alone.

        Raises:
            DataError: the model cannot score the conversation: it is empty, too long, or its roles are out of order.
            InfraError: the model failed: status 500, no answer in time, a killed worker, or a non-finite value.
        """

    async def close(self) -> None:
        """Release the model; calling it again does nothing."""


async def ready(scorer: object) -> None:
    """Load a scorer and check that it can score messages, by `load` and `check_messages` if it has them.

    A wrong setting then fails once, before anything is generated, instead of failing each score.

    Raises:
        ConfigError: the model cannot be loaded, or cannot score messages.
        InfraError: the model failed, or the server does not answer.
    """
    for name in ("load", "check_messages"):
        if hasattr(scorer, name):
            await getattr(scorer, name)()


def closed_error(where: str) -> InfraError:
    """Return the error for callers of a closed scorer."""
    return InfraError(f"{where}: expected an open scorer, got a closed one. Close it after the last episode.")


class CountingScorer(ABC):
    """A scorer with counts; a subclass scores one conversation."""

    counts: ClassVar[tuple[str, ...]] = ("num_scored", "num_failed", "num_truncated")
    """Attributes that `metrics` returns."""

    def __init__(self) -> None:
        self.num_scored = self.num_failed = self.num_truncated = 0
        """Conversations with a value, without one (except those whose caller was cancelled), and truncated ones."""

    def metrics(self) -> dict[str, float]:
        """Return the counts by the names of a run's metrics."""
        return {f"rm/{name}": float(getattr(self, name)) for name in self.counts}

    async def _counted(self, conversation: Any) -> Scored:
        """Return the result of `_scored`, and count it or its error."""
        try:
            scored = await self._scored(conversation)
        except AgentEnvError:
            self.num_failed += 1
            raise
        self.num_scored += 1
        self.num_truncated += scored.truncated
        return scored

    @abstractmethod
    async def _scored(self, conversation: Conversation) -> Scored: ...
