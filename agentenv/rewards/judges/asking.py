"""How a judge is asked: again where a reply holds no verdict, in several votes, and what those come to.

A reply without a verdict is the judge's failure: it is asked again, and then nobody knows what the response is worth.
Nothing else becomes a reward: no default, no middle of the scale.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Literal, TypeVar

from agentenv.agent import call
from agentenv.deadlines import StepTimeout, bounded
from agentenv.errors import InfraError
from agentenv.rewards._arguments import number, one_of, whole_number
from agentenv.rewards.judges.draws import Draw, Drawn, Judge
from agentenv.rewards.judges.failures import JudgeFailure, JudgeRefused, JudgeTimeout, JudgeUnclear
from agentenv.rewards.judges.settings import checked, settings_of
from agentenv.rewards.judges.templates import MAX_CHARS, Template
from agentenv.rewards.judges.usage import Usage
from agentenv.types import Message

_T = TypeVar("_T")
_MAX_PAUSE_S = 30.0
_SHORT_CHARS = 8000
_MARGIN_S = 2.0
"""For each attempt, in which a reply that takes too long is let go of."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How one vote is asked for."""

    attempts: int = 3
    """Most times, where there is no reply, or no verdict in it."""
    limit_s: float = 330.0
    """Longest that one reply may take: longer than the clients' own limit, since they try again themselves."""
    backoff_s: float = 0.5
    """Wait before the second attempt; twice as long before each further one, and at most 30 s."""
    max_chars: int = MAX_CHARS
    """The middle of longer texts is left out."""

    def __post_init__(self) -> None:
        """Refuse what cannot be kept to."""
        whole_number("Asking.attempts", self.attempts, low=1)
        number("Asking.limit_s", self.limit_s, low=0.001)
        number("Asking.backoff_s", self.backoff_s, low=0.0)
        whole_number("Asking.max_chars", self.max_chars, low=100)

    @property
    def patience_s(self) -> float:
        """Longest that all attempts take, with the waits between them."""
        first = sum(self.pause_s(attempt) for attempt in range(1, min(self.attempts, 64)))
        return self.attempts * (self.limit_s + _MARGIN_S) + first + max(self.attempts - 64, 0) * _MAX_PAUSE_S

    def pause_s(self, attempt: int) -> float:
        """The wait before an attempt; before the first, which is 0, there is none."""
        return min(self.backoff_s * 2.0 ** min(attempt - 1, 64), _MAX_PAUSE_S) if attempt else 0.0


@dataclass(frozen=True, slots=True)
class Voting:
    """How often one question is asked, and what becomes of the votes."""

    votes: int = 1
    """Asked for at once; more than one needs a judge that samples with a temperature."""
    min_votes: int | None = None
    """As many must give a verdict, or nobody knows; by default more than half."""
    combine: Literal["mean", "median", "majority"] = "mean"
    """Of numbers; "majority" is what most votes say, and nothing where two say so as often."""

    def __post_init__(self) -> None:
        """Refuse what no votes can meet."""
        whole_number("Voting.votes", self.votes, low=1)
        if self.min_votes is not None:
            whole_number("Voting.min_votes", self.min_votes, low=1, high=self.votes)
        one_of("Voting.combine", self.combine, ("mean", "median", "majority"))

    @property
    def needed(self) -> int:
        """How many votes must give a verdict."""
        return self.votes // 2 + 1 if self.min_votes is None else self.min_votes

    def combined(self, votes: Sequence[float], subject: str) -> float:
        """What the votes on a subject come to.

        Raises:
            JudgeUnclear: a majority is asked for and there is none.
        """
        if self.combine != "majority":
            return median(votes) if self.combine == "median" else fmean(votes)
        first, *others = Counter(votes).most_common(2)
        if others and others[0][1] == first[1]:
            raise JudgeUnclear(
                f"judge: expected a majority on {subject}, got {len(votes)} votes that are even. Ask for more."
            )
        return first[0]


class Asker:
    """Who asks a judge: what all kinds of judging have in common.

    Args:
        judge: who is asked.
        voting: how often each question is asked; a Voting, or its fields by name as JSON has them.
        asking: how often and how long each vote is; an Asking, or its fields by name.

    Raises:
        ConfigError: the judge is none, as its name would be, or the others are no such settings.
    """

    def __init__(self, judge: Judge, voting: Voting | Mapping[str, Any] | None, asking: Any) -> None:
        where = type(self).__name__
        self.judge = checked(where, judge)
        self.voting = settings_of(f"{where}.voting", voting, Voting())
        self.asking = settings_of(f"{where}.asking", asking, Asking())

    @property
    def patience_s(self) -> float:
        """Longest that grading may take, which `graded` keeps to where it is told nothing else."""
        return self.asking.patience_s

    async def _votes(self, template: Template, texts: Mapping[str, str], read: Callable[[str], _T | None]) -> list[_T]:
        """The votes on texts that gave a verdict, as `read` reads it.

        Raises:
            InfraError: too few did; with what is wrong with one of the others.
        """
        messages = await self._messages(template, texts)
        asked = [
            ask(Drawn(self.judge, vote), messages, read, self.asking, expected=template.expected)
            for vote in range(self.voting.votes)
        ]
        return needed(await asyncio.gather(*asked, return_exceptions=True), self.voting.needed)

    async def _messages(self, template: Template, texts: Mapping[str, str]) -> list[Message]:
        make = partial(template.messages, texts, max_chars=self.asking.max_chars)
        # Long texts take milliseconds, in which the loop would stand still.
        return await call(make) if sum(map(len, texts.values())) > _SHORT_CHARS else make()


async def ask(
    drawn: Drawn, messages: Sequence[Message], read: Callable[[str], _T | None], asking: Asking, *, expected: str
) -> _T:
    """What `read` makes of the judge's reply: of the first in which it finds something.

    Raises:
        JudgeUnclear: of all attempts none gave it, and the last one was a reply.
        InfraError: it was none; of the class that says why, where that is known.
        JudgeRefused: it refuses the question, which is then not asked again.
    """
    failure: Exception = JudgeUnclear("nothing")
    for attempt in range(asking.attempts):
        await asyncio.sleep(asking.pause_s(attempt))
        try:
            reply = await bounded(drawn.complete, messages, limit_s=asking.limit_s, flag="limit_s")
        except JudgeRefused:
            raise
        except (InfraError, StepTimeout) as error:
            failure = error
            continue
        found = read(reply) if isinstance(reply, str) else None
        if found is not None:
            return found
        failure = JudgeUnclear(f"{reply!r:.200}")
        if isinstance(usage := getattr(drawn.judge, "usage", None), Usage):
            usage.add(unclear=1)
    await _forgotten(drawn, messages, asking.attempts)
    if isinstance(failure, JudgeUnclear):
        raise JudgeUnclear(
            f"judge: expected {expected} in {asking.attempts} attempts, the last gave {str(failure).rstrip('.')}. "
            "Mend the judge."
        ) from failure
    kind = JudgeTimeout if isinstance(failure, StepTimeout) else InfraError
    raise (type(failure) if isinstance(failure, JudgeFailure) else kind)(
        f"judge: expected a reply in {asking.attempts} attempts, the last failed: {failure}"
    ) from failure


async def _forgotten(drawn: Drawn, messages: Sequence[Message], attempts: int) -> None:
    """A judge that keeps replies forgets those that came to nothing: kept, they would be the answer for ever."""
    forget: Callable[[Sequence[Message], Draw], Awaitable[None]] | None = getattr(drawn.judge, "forget", None)
    if forget is not None:
        for attempt in range(attempts):
            await forget(messages, Draw(drawn.vote, attempt))


def needed(found: Sequence[_T | BaseException], least: int) -> list[_T]:
    """What was found, without the failures.

    Raises:
        InfraError: it is less than `least`, of the first failure's class; the only failure itself, where there was but
            one question.
        BaseException: a failure that is no InfraError.
    """
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, InfraError):
            raise error
    valid = [each for each in found if not isinstance(each, BaseException)]
    if len(valid) >= least:
        return valid
    if len(found) == 1:
        raise errors[0]
    kind = type(errors[0]) if isinstance(errors[0], JudgeFailure) else InfraError
    message = f"judge: expected at least {least} of {len(found)} verdicts, got {len(valid)}: {errors[0]}"
    raise kind(message) from errors[0]
