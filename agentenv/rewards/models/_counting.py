"""What all scorers have in common: counts of what became of conversations, and what is said of one that was closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from agentenv.errors import AgentEnvError, InfraError
from agentenv.rewards.models.types import Conversation, Scored


def closed_error(where: str) -> InfraError:
    """Of who asks a scorer, or still waits, when it was closed."""
    return InfraError(f"{where}: expected an open scorer, got a closed one. Close it after the last episode.")


class CountingScorer(ABC):
    """A scorer that counts, whose subclass says how one conversation is scored."""

    counts: ClassVar[tuple[str, ...]] = ("num_scored", "num_failed", "num_truncated")
    """Attributes that `metrics` gives."""

    def __init__(self) -> None:
        self.num_scored = self.num_failed = self.num_truncated = 0
        """Conversations that have a value, that have none (but for those whose caller was cancelled), and that were
        cut."""

    def metrics(self) -> dict[str, float]:
        """What was counted, by the names of a run's metrics."""
        return {f"rm/{name}": float(getattr(self, name)) for name in self.counts}

    async def _counted(self, conversation: Conversation) -> Scored:
        """What `_scored` gives or raises, counted."""
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
