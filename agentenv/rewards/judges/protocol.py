"""Define what a judge is, and tell several replies to equal messages apart: those of k votes, and of retries.

Otherwise a cache would return the same reply to all votes, and would always return the one that cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from agentenv.core.types import Message
from agentenv.errors import InfraError


class JudgeFailure(InfraError):
    """The base of all of them."""


class JudgeUnavailable(JudgeFailure):
    """The judge cannot be reached, or reports that it cannot answer now; a later retry may help."""


class JudgeTimeout(JudgeFailure):
    """The judge did not answer in time."""


class JudgeUnreadable(JudgeFailure):
    """The answer holds no reply: it is not JSON, too long, of another form, or empty."""


class JudgeTruncated(JudgeFailure):
    """The reply was cut off at its length limit: its end, with the verdict, is unknown."""


class JudgeRefused(JudgeFailure):
    """The judge refuses these messages, or this client; a retry cannot help."""


class JudgeMisaddressed(JudgeRefused):
    """The address has no judge, or not for this key: every question will fail."""


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


class JudgeVote:
    """One vote of a judge on one question: each call is a new attempt, unless the judge has refused the question.

    Make one for each question. A judge that does not tell replies apart is asked again with equal messages.
    """

    def __init__(self, judge: Judge, vote: int = 0) -> None:
        self.judge = judge
        self.vote = vote
        self._attempts = 0
        self._refusal = ""

    async def complete(self, messages: Sequence[Message]) -> str:
        """Return the next reply.

        Raises:
            InfraError: there is none.
        """
        if self._refusal:
            raise JudgeRefused(self._refusal)
        index = ReplyIndex(self.vote, self._attempts)
        self._attempts += 1
        try:
            if isinstance(self.judge, IndexedJudge):
                return await self.judge.reply_at(messages, index)
            return await self.judge.complete(messages)
        except JudgeRefused as error:
            self._refusal = str(error)
            raise
