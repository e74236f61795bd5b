"""Who is asked, and several replies to equal messages told apart: those of k votes, and of the next attempts.

Without this a cache would give the same reply to all votes, and for ever the one that could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from agentenv.rewards.judges.failures import JudgeRefused
from agentenv.types import Message

ATTEMPTS_APART = 1000
"""Seeds between one vote and the next."""


class Judge(Protocol):
    """A language model that answers; safe to ask from several tasks at once."""

    async def complete(self, messages: Sequence[Message]) -> str:
        """Its reply to a conversation.

        Raises:
            InfraError: none can be had.
        """


class Draw(NamedTuple):
    """Which of the replies to equal messages is meant."""

    vote: int = 0
    attempt: int = 0

    def seed(self, seed: int | None) -> int | None:
        """A seed of its own, from that of the sampling; None where that has none."""
        return None if seed is None else seed + ATTEMPTS_APART * self.vote + self.attempt


@runtime_checkable
class DrawingJudge(Judge, Protocol):
    """A judge that tells the replies to equal messages apart; `complete` gives the first of them."""

    async def draw(self, messages: Sequence[Message], draw: Draw) -> str:
        """That one of its replies.

        Raises:
            InfraError: none can be had.
        """


class Drawn:
    """One vote of a judge on one question: asked again it draws again, unless the judge has refused the question.

    Make one for each question that is asked; judges that do not tell replies apart are asked as they are.
    """

    def __init__(self, judge: Judge, vote: int = 0) -> None:
        self.judge, self.vote = judge, vote
        self._attempts, self._refusal = 0, ""

    async def complete(self, messages: Sequence[Message]) -> str:
        """The next reply.

        Raises:
            InfraError: none can be had.
        """
        if self._refusal:
            raise JudgeRefused(self._refusal)
        draw = Draw(self.vote, self._attempts)
        self._attempts += 1
        try:
            if isinstance(self.judge, DrawingJudge):
                return await self.judge.draw(messages, draw)
            return await self.judge.complete(messages)
        except JudgeRefused as error:
            self._refusal = str(error)
            raise
