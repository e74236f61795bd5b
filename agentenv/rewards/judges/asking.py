"""Ask a judge, made from settings such as JSON has them, again until it has a verdict, and combine its votes.

A reply without a verdict is a failure of the judge: it is asked again, and after the last attempt the worth of the
response is unknown. It never becomes a default reward or the middle of the scale.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Literal, TypeVar

from agentenv._util.calls import StepTimeout, bounded, call
from agentenv.core.arguments import construct, number, one_of, settings_from, whole_number
from agentenv.core.types import Message
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.judges.openai import JUDGING, CachedJudge, OpenAIJudge, ReplyCache, RequestOptions
from agentenv.rewards.judges.protocol import (
    IndexedJudge,
    Judge,
    JudgeFailure,
    JudgeRefused,
    JudgeTimeout,
    JudgeUnclear,
    JudgeUsage,
    Price,
    ReplyIndex,
)
from agentenv.rewards.judges.templates import MAX_CHARS, JudgeTemplate

# --- settings ---------------------------------------------------------------------------------------------------------


def judge_of(where: str, judge: Any) -> Judge:
    """Return the judge, made from settings if it is a mapping; see `judge_from`.

    Raises:
        ConfigError: it is not a judge, or the settings are wrong.
    """
    if isinstance(judge, Mapping):
        judge = judge_from(judge)
    if not callable(getattr(judge, "complete", None)) or isinstance(judge, type):
        raise ConfigError(f"{where}.judge: expected an object with `async def complete(messages)`, got {judge!r:.200}.")
    return judge  # type: ignore[no-any-return]


def client_options() -> list[str]:
    """Return the names of the settings that `judge_from` accepts."""
    return [*(name for name in inspect.signature(OpenAIJudge).parameters if name != "usage"), "price", "cache"]


def judge_from(settings: Mapping[str, Any]) -> Any:
    """Return an `OpenAIJudge`, or a `CachedJudge` around it.

    Args:
        settings: the constructor's arguments by name, at least `base_url` and `model`; `sampling`, `request_options`
            and `price` (of a `protocol.Price`) are objects of their fields. `cache` is a file of earlier replies.

    Raises:
        ConfigError: an argument is missing or unknown, or has an invalid value.
    """
    options, known = dict(settings), client_options()
    unknown = [name for name in options if name not in known]
    missing = [name for name in ("base_url", "model") if name not in options]
    if unknown or missing:
        got = f"{unknown[0]!r}" if unknown else f"no {' and no '.join(missing)}"
        raise ConfigError(
            f"judge: expected settings with base_url and model, and others among {', '.join(known[2:])}, got {got}. "
            "Correct the settings of the judge."
        )
    cache, price = options.pop("cache", None), settings_from("judge.price", options.pop("price", None), Price())
    for name, default in {"sampling": JUDGING, "request_options": RequestOptions()}.items():
        if name in options:
            options[name] = settings_from(f"judge.{name}", options[name], default)
    judge = construct("judge", partial(OpenAIJudge, usage=JudgeUsage(price)), options)
    return judge if cache is None else CachedJudge(judge, construct("judge.cache", ReplyCache, {"path": cache}))


# --- asking -----------------------------------------------------------------------------------------------------------

_T = TypeVar("_T")
_MAX_PAUSE_S = 30.0
_SHORT_CHARS = 8000
_MARGIN_S = 2.0
"""Added to each attempt, for the cancellation of a reply that takes too long."""


@dataclass(frozen=True, slots=True)
class JudgeRetry:
    """Attempts and time limits of one vote."""

    attempts: int = 3
    """Maximum number of attempts, if the reply or its verdict is missing."""
    limit_s: float = 330.0
    """Time limit of one reply; longer than the clients' own limit, since they retry themselves."""
    backoff_s: float = 0.5
    """Pause before the second attempt; it doubles before each further one, up to 30 s."""
    max_chars: int = MAX_CHARS
    """Longer texts lose their middle."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range."""
        whole_number("JudgeRetry.attempts", self.attempts, low=1)
        number("JudgeRetry.limit_s", self.limit_s, low=0.001)
        number("JudgeRetry.backoff_s", self.backoff_s, low=0.0)
        whole_number("JudgeRetry.max_chars", self.max_chars, low=100)

    @property
    def patience_s(self) -> float:
        """Time limit of all attempts together, with the pauses between them."""
        first = sum(self.pause_s(attempt) for attempt in range(1, min(self.attempts, 64)))
        return self.attempts * (self.limit_s + _MARGIN_S) + first + max(self.attempts - 64, 0) * _MAX_PAUSE_S

    def pause_s(self, attempt: int) -> float:
        """Return the pause before an attempt; 0.0 for the first, which is number 0."""
        return min(self.backoff_s * 2.0 ** min(attempt - 1, 64), _MAX_PAUSE_S) if attempt else 0.0


@dataclass(frozen=True, slots=True)
class Voting:
    """How often one question is asked, and how the votes are combined."""

    votes: int = 1
    """Votes, asked for concurrently; more than one needs a judge that samples with a temperature."""
    min_votes: int | None = None
    """Number of votes that must have a verdict, or there is none; default: more than half."""
    combine: Literal["mean", "median", "majority"] = "mean"
    """How numbers are combined; "majority" takes the most frequent one, and fails if two are equally frequent."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range."""
        whole_number("Voting.votes", self.votes, low=1)
        if self.min_votes is not None:
            whole_number("Voting.min_votes", self.min_votes, low=1, high=self.votes)
        one_of("Voting.combine", self.combine, ("mean", "median", "majority"))

    def merge(self, votes: Sequence[float], subject: str) -> float:
        """Return the combination of the votes on a subject.

        Raises:
            JudgeUnclear: a majority is required and there is none.
        """
        if self.combine != "majority":
            return median(votes) if self.combine == "median" else fmean(votes)
        first, *others = Counter(votes).most_common(2)
        if others and others[0][1] == first[1]:
            raise JudgeUnclear(
                f"judge: expected a majority on {subject}, got {len(votes)} votes that are even. Ask for more."
            )
        return first[0]


class VotingBase:
    """The base of all rewards that ask a judge.

    Args:
        judge: the judge, or settings for `asking.judge_from`.
        voting: how often each question is asked; a Voting, or its fields by name as JSON has them.
        retry: attempts and time limits of each vote; a JudgeRetry, or its fields by name.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(self, judge: Judge, voting: Voting | Mapping[str, Any] | None, retry: Any) -> None:
        where = type(self).__name__
        self.judge = judge_of(where, judge)
        self.voting = settings_from(f"{where}.voting", voting, Voting())
        self.retry = settings_from(f"{where}.asking", retry, JudgeRetry())

    @property
    def patience_s(self) -> float:
        """Default time limit of `grading.grade` for this reward."""
        return self.retry.patience_s

    async def _votes(
        self, template: JudgeTemplate, texts: Mapping[str, str], read: Callable[[str], _T | None]
    ) -> list[_T]:
        """Return the verdicts of the votes on these texts, as `read` reads them.

        Raises:
            InfraError: too few votes have one; says what is wrong with one of the others.
        """
        messages = await self._messages(template, texts)
        votes = [
            ask(self.judge, messages, read, self.retry, expected=template.expected, vote=vote)
            for vote in range(self.voting.votes)
        ]
        least = self.voting.votes // 2 + 1 if self.voting.min_votes is None else self.voting.min_votes
        return successes(await asyncio.gather(*votes, return_exceptions=True), least)

    async def _messages(self, template: JudgeTemplate, texts: Mapping[str, str]) -> list[Message]:
        make = partial(template.messages, texts, max_chars=self.retry.max_chars)
        # Long texts take milliseconds, during which the event loop would be blocked.
        return await call(make) if sum(map(len, texts.values())) > _SHORT_CHARS else make()


async def ask(
    judge: Judge,
    messages: Sequence[Message],
    read: Callable[[str], _T | None],
    retry: JudgeRetry,
    *,
    expected: str,
    vote: int = 0,
) -> _T:
    """Return what `read` finds in the judge's reply, retrying until it finds something.

    A judge that does not tell replies apart is asked again with equal messages.

    Raises:
        JudgeUnclear: no attempt had a verdict, and the last one had a reply.
        InfraError: the last attempt had no reply; of the class for the reason, if that is known.
        JudgeRefused: the judge refuses the question, which is not retried.
    """
    failure: Exception = JudgeUnclear("nothing")
    for attempt in range(retry.attempts):
        await asyncio.sleep(retry.pause_s(attempt))
        question: list[Any] = [judge.complete, messages]
        if isinstance(judge, IndexedJudge):
            question = [judge.reply_at, messages, ReplyIndex(vote, attempt)]
        try:
            reply = await bounded(*question, limit_s=retry.limit_s, flag="limit_s")
        except JudgeRefused:
            raise
        except (InfraError, StepTimeout) as error:
            failure = error
            continue
        verdict = read(reply) if isinstance(reply, str) else None
        if verdict is not None:
            return verdict
        failure = JudgeUnclear(f"{reply!r:.200}")
        if isinstance(usage := getattr(judge, "usage", None), JudgeUsage):
            usage.add(unclear=1)
    # A judge with a cache forgets replies without a verdict: kept, they would be the answer for ever.
    forget: Callable[[Sequence[Message], ReplyIndex], Awaitable[None]] | None = getattr(judge, "forget", None)
    if forget is not None:
        for attempt in range(retry.attempts):
            await forget(messages, ReplyIndex(vote, attempt))
    if isinstance(failure, JudgeUnclear):
        raise JudgeUnclear(
            f"judge: expected {expected} in {retry.attempts} attempts, the last gave {str(failure).rstrip('.')}. "
            "Fix the judge."
        ) from failure
    kind = JudgeTimeout if isinstance(failure, StepTimeout) else InfraError
    raise (type(failure) if isinstance(failure, JudgeFailure) else kind)(
        f"judge: expected a reply in {retry.attempts} attempts, the last failed: {failure}"
    ) from failure


def successes(results: Sequence[_T | BaseException], least: int) -> list[_T]:
    """Return the results that are not failures.

    Raises:
        InfraError: there are fewer than `least`; of the first failure's class, or the failure itself if there was only
            one question.
        BaseException: a failure that is not an InfraError.
    """
    errors = [each for each in results if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, InfraError):
            raise error
    valid = [each for each in results if not isinstance(each, BaseException)]
    if len(valid) >= least:
        return valid
    if len(results) == 1:
        raise errors[0]
    kind = type(errors[0]) if isinstance(errors[0], JudgeFailure) else InfraError
    message = f"judge: expected at least {least} of {len(results)} verdicts, got {len(valid)}: {errors[0]}"
    raise kind(message) from errors[0]
