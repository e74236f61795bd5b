"""What every reward model gives, wherever it runs: one raw number per conversation, or an error of that one alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentenv.types import Message

Conversation = str | Sequence[Message]
"""Raw messages, which the reward model's own tokenizer renders with its own template; or text, taken as it is."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a reward model said about one conversation."""

    value: float
    """Raw: as the model's head gave it, without activation, shift, scale or clipping. Finite."""
    num_tokens: int | None = None
    """Tokens that it was computed from; None where a server does not say."""
    truncated: bool = False
    """Whether the conversation was longer than the model takes, and was cut."""


class Scorer(Protocol):
    """A reward model. It may be asked about many conversations at once; it forms the batches itself."""

    async def score(self, conversation: Conversation) -> Scored:
        """The value of one conversation; never blocks the event loop, and fails for this one alone.

        Raises:
            DataError: the conversation is none that this model can score: empty, too long, roles out of order.
            InfraError: the model failed: status 500, no answer in time, a killed worker, a value that is no number.
        """

    async def close(self) -> None:
        """Free what it holds; calling it again does nothing."""


async def ready(scorer: object) -> None:
    """Load what is about to be asked about messages, and see that it can be, where it says: `load`, `check_messages`.

    A wrong setting then fails once, before anything is generated, and is no failure of each score.

    Raises:
        ConfigError: it cannot be loaded, or cannot score messages.
        InfraError: it failed, or does not answer.
    """
    for name in ("load", "check_messages"):
        if hasattr(scorer, name):
            await getattr(scorer, name)()
