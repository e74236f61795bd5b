"""Define what a judge is, count what it costs, and tell several replies to equal messages apart: of votes, of retries.

Otherwise a cache would return the same reply to all votes, and would always return the one that cannot be read.
`judge_from` makes a judge from settings such as JSON has them.

A reply without a verdict is a failure of the judge: it is asked again, and after the last attempt the worth of the
response is unknown. It never becomes a default reward or the middle of the scale.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from agentenv._util.calls import StepTimeout, bounded, call
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.core.types import Message
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.grading import add_usage
from agentenv.rewards.judges.templates import MAX_CHARS, JudgeTemplate
from agentenv.rewards.loading import settings_from

USAGE_PREFIX = "judge/"
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
        """Add to the counts, and, with the cost, to the usage of the caller; see `rewards.grading`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
        cost = self._cost(counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0))
        add_usage({f"{USAGE_PREFIX}{name}": count for name, count in counts.items()} | {f"{USAGE_PREFIX}cost": cost})

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
    from agentenv.rewards.judges.openai import OpenAIJudge

    return [*(name for name in inspect.signature(OpenAIJudge).parameters if name != "usage"), "price", "cache"]


def judge_from(settings: Mapping[str, Any]) -> Any:
    """Return an `OpenAIJudge`, or a `CachedJudge` around it.

    Args:
        settings: the constructor's arguments by name, at least `base_url` and `model`; `sampling`, `request_options`
            and `price` (of a `protocol.Price`) are objects of their fields. `cache` is a file of earlier replies.

    Raises:
        ConfigError: an argument is missing or unknown, or has an invalid value.
    """
    from agentenv.rewards.judges.openai import JUDGING, CachedJudge, OpenAIJudge, ReplyCache, RequestOptions

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
    options["sampling"] = settings_from("judge.sampling", options.get("sampling"), JUDGING)
    options["request_options"] = settings_from(
        "judge.request_options", options.get("request_options"), RequestOptions()
    )
    try:
        judge = OpenAIJudge(**options, usage=JudgeUsage(price))
        return judge if cache is None else CachedJudge(judge, ReplyCache(cache))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"judge: expected settings of other types, got {dict(settings)!r:.300} ({error}).") from error


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
        judge: the judge, or settings for `protocol.judge_from`.
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
