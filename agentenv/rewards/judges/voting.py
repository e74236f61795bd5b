"""Several votes on one question: how many are asked for, how many must come, and what they come to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, TypeVar

from agentenv.errors import InfraError
from agentenv.rewards._arguments import one_of, whole_number
from agentenv.rewards.judge import Asking, Judge, ask
from agentenv.rewards.judges.draws import Drawn
from agentenv.types import Message

_T = TypeVar("_T")

PATIENT = Asking(attempts=3, limit_s=330.0)
"""How clients of this package are asked: for longer than their own limit, since they try again themselves."""


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

    def combined(self, votes: Sequence[float]) -> float | None:
        """What the votes come to; None where a majority is asked for and there is none."""
        if self.combine == "majority":
            first, *others = Counter(votes).most_common(2)
            return None if others and others[0][1] == first[1] else first[0]
        return median(votes) if self.combine == "median" else fmean(votes)


async def poll(
    judge: Judge,
    messages: Sequence[Message],
    read: Callable[[str], _T | None],
    *,
    asking: Asking,
    voting: Voting,
    expected: str,
) -> list[_T]:
    """The votes that gave a verdict, as `read` reads it; see `judge.ask`.

    Raises:
        InfraError: too few did; with what is wrong with one of the others.
    """
    asked = [ask(Drawn(judge, vote), messages, read, asking, expected=expected) for vote in range(voting.votes)]
    return needed(await asyncio.gather(*asked, return_exceptions=True), voting.needed)


def needed(found: Sequence[_T | BaseException], least: int) -> list[_T]:
    """What was found, without the failures.

    Raises:
        InfraError: it is less than `least`; the only failure itself, where there was but one question.
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
    message = f"judge: expected at least {least} of {len(found)} verdicts, got {len(valid)}: {errors[0]}"
    raise InfraError(message) from errors[0]
