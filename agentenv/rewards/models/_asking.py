"""What scorers that ask somebody else have in common: who waits is asked about together, what failed is tried again.

Everybody who asks has an answer or an error of its own. A request for several that fails as one of them may have made
it fail is sent again for each alone, at once: whose fault it is shows then, and the others have their answers.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypedDict, TypeVar

from agentenv.deadlines import waiting
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards._http import pause_s
from agentenv.rewards.models._counting import CountingScorer, closed_error
from agentenv.rewards.models._http import Failure
from agentenv.rewards.models.types import Conversation, Scored
from agentenv.rewards.per_loop import PerLoop
from agentenv.rewards.spent import RM_RETRIED, spend

_P = TypeVar("_P")
_T = TypeVar("_T")
FIRST_PAUSE_S = 0.25
_CLOSE_GRACE_S = 10.0
_MARGIN_S = 5.0


class AskingFields(TypedDict, total=False):
    """The fields of Asking, as a scorer's arguments."""

    timeout_s: float
    retries: int
    max_batch: int
    max_wait_s: float
    max_concurrent: int
    api_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How it is asked."""

    timeout_s: float = 60.0
    """Longest that one answer may take, with all attempts and the pauses between; a wait for its turn not counted. One
    attempt may take half of it, where there can be a second."""
    retries: int = 3
    """Further attempts after the first."""
    max_batch: int = 1
    """Most that one request asks about."""
    max_wait_s: float = 0.005
    """How long who comes first waits for others to be asked about with."""
    max_concurrent: int = 64
    """Requests in flight at once, on each event loop."""
    api_key: str | None = field(default=None, repr=False)
    """Sent to servers as a bearer token."""

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any], **defaults: Any) -> Asking:
        """With these fields, and the defaults for others.

        Raises:
            ConfigError: there is no such field, or a number is out of range.
        """
        names = [each.name for each in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ConfigError(f"{where}: expected options among {', '.join(names)}, got {unknown[0]!r}. Leave it out.")
        made = cls(**{**defaults, **given})
        number(f"{where}.timeout_s", made.timeout_s, low=0.001)
        whole_number(f"{where}.retries", made.retries, high=100)
        whole_number(f"{where}.max_batch", made.max_batch, low=1)
        number(f"{where}.max_wait_s", made.max_wait_s, low=0.0)
        whole_number(f"{where}.max_concurrent", made.max_concurrent, low=1)
        return made

    @property
    def attempt_s(self) -> float:
        """Longest that one attempt may take."""
        return self.timeout_s / 2 if self.retries else self.timeout_s


@dataclass(eq=False, slots=True)
class _Item(Generic[_P, _T]):
    """One thing that is asked, once."""

    given: _P
    limit_s: float
    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answer: asyncio.Future[_T | Failure] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When it came; then when it was sent. Times of the loop."""
    sent_with: int = 0
    """Of how many it was one."""

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.begun.cancelled() or self.answer.done()

    def begin(self, now: float, sent_with: int) -> None:
        """It is being sent, as one of so many."""
        self.since, self.sent_with = now, sent_with
        self.begun.set_result(None)

    def settle(self, found: _T | Failure | BaseException) -> None:
        """Wake who waits, if anybody still does."""
        if not self.begun.done():
            self.begun.set_result(None)
        if self.answer.done():
            return
        if isinstance(found, BaseException):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


Send = Callable[[list[_P]], Awaitable[Sequence[_T | Failure] | Failure]]
"""Asks about several at once: an answer or a failure for each, or one failure for all. It is cancelled at its limit."""


class Asker(Generic[_P, _T]):
    """Asks about what many callers want to know, on any event loops.

    Args:
        where: names the one that is asked, in errors.
        send: see Send.
        asking: deadlines, attempts, how many at once.
    """

    def __init__(self, where: str, send: Send[_P, _T], asking: Asking) -> None:
        self.where, self.send, self.asking = where, send, asking
        self.num_retried = 0
        """Attempts that were not the first; those for one alone after one for several are none."""
        self.closed = False
        self._lines: PerLoop[_Line[_P, _T]] = PerLoop(lambda: _Line(self))

    async def ask(self, given: _P, *, alone: bool = False) -> _T:
        """The answer for one; `alone` asks about no other with it.

        Raises:
            AgentEnvError: there is none, for this one; its class is that of the last attempt's failure.
        """
        left_s, num_failed = self.asking.timeout_s, 0
        while True:
            item: _Item[_P, _T] = _Item(given, min(self.asking.attempt_s, left_s))
            found = await self._once(item, alone)
            if not isinstance(found, Failure):
                return found
            left_s -= asyncio.get_running_loop().time() - item.since
            again = num_failed > 0 or not self.asking.retries
            if item.sent_with > 1 and left_s > 0.0 and (found.suspect or (found.suspect_again and again)):
                alone = True
                continue
            num_failed += 1
            left_s -= await self._paused(found, num_failed, left_s)

    async def close(self) -> None:
        """Ask nobody any more; what this loop still asks fails. Calling it again does nothing."""
        self.closed = True
        line = self._lines.drop()
        if line is not None:
            await line.close()

    async def _once(self, item: _Item[_P, _T], alone: bool) -> _T | Failure:
        if self.closed:
            raise self.closed_error()
        line = self._lines.here()
        line.put(item, alone)
        try:
            with waiting():
                await item.begun
            return await item.answer
        finally:
            item.answer.cancel()  # which does nothing to one that is known
            line.left(item)

    async def _paused(self, failure: Failure, num_failed: int, left_s: float) -> float:
        """Wait before the next attempt, and give how long that was.

        Raises:
            AgentEnvError: there is none.
        """
        error, wait_s = failure.error, max(pause_s(num_failed, FIRST_PAUSE_S), failure.retry_after_s)
        attempts = f"({num_failed} attempt{'s' * (num_failed > 1)}"
        if not failure.may_pass or not self.asking.retries:
            raise error
        if num_failed > self.asking.retries:
            raise type(error)(f"{error} {attempts}.)") from error
        if wait_s >= left_s:
            raise type(error)(f"{error} {attempts}; the next, in {wait_s:.1f} s, would be too late.)") from error
        self.num_retried += 1
        spend({RM_RETRIED: 1})
        await asyncio.sleep(wait_s)
        return wait_s

    def closed_error(self) -> InfraError:
        """Of who asks, or still waits, when it was closed."""
        return closed_error(self.where)


class _Line(Generic[_P, _T]):
    """Those who wait on one event loop, and the requests that are under way there; it keeps no hold on the loop."""

    def __init__(self, asker: Asker[_P, _T]) -> None:
        self._asker = asker
        self._alone: deque[_Item[_P, _T]] = deque()
        self._together: deque[_Item[_P, _T]] = deque()
        self._sending: dict[asyncio.Task[Any], list[_Item[_P, _T]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: _Item[_P, _T], alone: bool) -> None:
        """Have it asked, in its turn."""
        (self._alone if alone or self._asker.asking.max_batch == 1 else self._together).append(item)
        self._send_next()

    def left(self, item: _Item[_P, _T]) -> None:
        """Nobody waits for it any more: a request that nobody waits for ends, and makes room."""
        for task, items in self._sending.items():
            if item in items and all(each.is_left for each in items):
                task.cancel()

    async def close(self) -> None:
        """End all requests, and all waits."""
        waiting_now = [*self._alone, *self._together]
        self._alone.clear()
        self._together.clear()
        for item in waiting_now:
            item.settle(self._asker.closed_error())
        tasks = list(self._sending)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_GRACE_S)

    def _send_next(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._sending) < self._asker.asking.max_concurrent and (items := self._taken()):
            for item in items:
                item.begin(loop.time(), len(items))
            # In a context of nobody: whoever happened to be here may have a clock that others would stop.
            task = loop.create_task(self._request(items), context=contextvars.Context())
            self._sending[task] = items
            task.add_done_callback(self._settled)

    def _taken(self) -> list[_Item[_P, _T]]:
        """Those to ask about next; none where nobody waits, or not long enough."""
        for queue in (self._alone, self._together):
            while queue and queue[0].is_left:
                queue.popleft()
        if self._alone or not self._together:
            return [self._alone.popleft()] if self._alone else []
        most, wait_s = self._asker.asking.max_batch, self._asker.asking.max_wait_s
        loop = asyncio.get_running_loop()
        left_s = self._together[0].since + wait_s - loop.time()
        if len(self._together) < most and left_s > 0.0:
            if self._timer is None:
                self._timer = loop.call_later(left_s, self._waited)
            return []
        taken: list[_Item[_P, _T]] = []
        while self._together and len(taken) < most:
            item = self._together.popleft()
            taken += [] if item.is_left else [item]
        return taken

    def _waited(self) -> None:
        self._timer = None
        self._send_next()

    async def _request(self, items: list[_Item[_P, _T]]) -> Sequence[_T | Failure]:
        """An answer or a failure for each."""
        limit_s = min(item.limit_s for item in items)
        found: Sequence[_T | Failure] | Failure
        try:
            async with asyncio.timeout(limit_s) as deadline:
                found = await self._asker.send([item.given for item in items])
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = f"{self._asker.where}: expected an answer within {limit_s:.4g} s, got none. Raise timeout_s."
            found = Failure(_from(InfraError(message), error), may_pass=True, suspect=True)
        except AgentEnvError as error:
            found = Failure(error, may_pass=isinstance(error, InfraError), suspect=True)
        return [found] * len(items) if isinstance(found, Failure) else found

    def _settled(self, task: asyncio.Task[Sequence[_T | Failure]]) -> None:
        items = self._sending.pop(task)
        error = self._asker.closed_error() if task.cancelled() else task.exception()
        for index, item in enumerate(items):
            item.settle(task.result()[index] if error is None else error)
        self._send_next()


def _from(error: InfraError, cause: BaseException) -> InfraError:
    error.__cause__ = cause
    return error


class AskingScorer(CountingScorer, Generic[_P, _T]):
    """A scorer over an Asker: what it counts, and how it ends."""

    counts = (*CountingScorer.counts, "num_retried")

    def __init__(self, where: str, send: Send[_P, _T], asking: Asking) -> None:
        super().__init__()
        self.asker: Asker[_P, _T] = Asker(where, send, asking)

    @property
    def num_retried(self) -> int:
        """Attempts that were not a conversation's first."""
        return self.asker.num_retried

    @property
    def patience_s(self) -> float:
        """Longest that a score may take, its turn not counted; its own error comes before."""
        return self.asker.asking.timeout_s + _MARGIN_S

    async def score(self, conversation: Conversation) -> Scored:
        """The raw number of a conversation; see `agentenv.rewards.models.types.Scorer`.

        Raises:
            DataError: the conversation is none that can be scored.
            InfraError: there is no value in time, or after all attempts, or it is no finite number.
            ConfigError: asking cannot help: the address, the key, the model or a setting is wrong.
        """
        return await self._counted(conversation)

    async def check_messages(self) -> None:
        """See whether messages can be scored at all, for who will ask about many: a wrong setting fails once, at first.

        Raises:
            ConfigError: they cannot, or asking cannot help; see `score`.
            InfraError: whoever is asked gives no answer.
        """

    async def close(self) -> None:
        """Ask nobody any more; what this loop still asks fails. Calling it again does nothing."""
        await self.asker.close()
