"""The request queue of scorers that use a server or a function: items are batched, and failed requests repeated.

Each caller gets its own answer or error. If a request for several items fails and one of them may be the cause, each
item is sent again alone at once: the faulty one fails, and the others get their answers.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypedDict, TypeVar

from agentenv._util.calls import waiting
from agentenv._util.http.client import AttemptFailure, RetryPolicy
from agentenv._util.per_loop import PerLoop
from agentenv.core.arguments import number, whole_number
from agentenv.errors import AgentEnvError, InfraError
from agentenv.rewards.grading import RM_RETRIED, add_usage
from agentenv.rewards.models.types import Conversation, CountingScorer, Scored, closed_error

_P = TypeVar("_P")
_T = TypeVar("_T")
FIRST_PAUSE_S = 0.25
_CLOSE_GRACE_S = 10.0
_MARGIN_S = 5.0


class QueueOptionFields(TypedDict, total=False):
    """The fields of QueueOptions, as a scorer's arguments."""

    timeout_s: float
    retries: int
    max_batch: int
    max_wait_s: float
    max_concurrent: int
    api_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Deadlines, retries and batching of requests."""

    timeout_s: float = 60.0
    """Deadline of one answer, including all attempts and pauses but not the wait for its turn. One attempt may take
    half of it if there can be a second."""
    retries: int = 3
    """Further attempts after the first."""
    max_batch: int = 1
    """Maximum number of items per request."""
    max_wait_s: float = 0.005
    """How long the first item of a batch waits for others."""
    max_concurrent: int = 64
    """Requests in flight at once, on each event loop."""
    api_key: str | None = field(default=None, repr=False)
    """Sent to servers as a bearer token."""

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any], **defaults: Any) -> QueueOptions:
        """Return options with these fields and the defaults for others.

        Raises:
            ConfigError: a number is out of range.
        """
        options = cls(**{**defaults, **given})
        number(f"{where}.timeout_s", options.timeout_s, low=0.001)
        whole_number(f"{where}.retries", options.retries, high=100)
        whole_number(f"{where}.max_batch", options.max_batch, low=1)
        number(f"{where}.max_wait_s", options.max_wait_s, low=0.0)
        whole_number(f"{where}.max_concurrent", options.max_concurrent, low=1)
        return options

    def one_at_once(self, **changes: Any) -> QueueOptions:
        """Return options by which callers that arrive during a request share the next one."""
        return replace(self, max_batch=1 << 20, max_wait_s=0.0, max_concurrent=1, **changes)


@dataclass(eq=False, slots=True)
class _WaitingRequest(Generic[_P, _T]):
    """One attempt for one item."""

    given: _P
    limit_s: float
    alone: bool
    """Whether no other item is sent with it."""
    started: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answer: asyncio.Future[_T | AttemptFailure] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """Loop time of its arrival, then of its sending."""
    sent_with: int = 0
    """Number of items in its request."""

    @property
    def is_left(self) -> bool:
        """Whether no caller waits for it any more."""
        return self.started.cancelled() or self.answer.done()

    def settle(self, found: _T | AttemptFailure | BaseException) -> None:
        """Hand the result to the caller, if it still waits."""
        if not self.started.done():
            self.started.set_result(None)
        if self.answer.done():
            return
        if isinstance(found, BaseException):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


Send = Callable[[list[_P]], Awaitable[Sequence[_T | AttemptFailure] | AttemptFailure]]
"""Sends several items; returns an answer or failure for each, or one failure for all. Cancelled at its deadline."""


class RequestQueue(Generic[_P, _T]):
    """Sends the items of many callers, on any event loops.

    Args:
        where: the server or function, for errors.
        send: see Send.
        asking: deadlines, attempts, batching.
    """

    def __init__(self, where: str, send: Send[_P, _T], asking: QueueOptions) -> None:
        self.where = where
        self.send = send
        self.asking = asking
        self.policy = RetryPolicy(max_attempts=asking.retries + 1, first_pause_s=FIRST_PAUSE_S)
        self.num_retried = 0
        """Repeated attempts, without those for single items after a failed request for several."""
        self.closed = False
        self._lines: PerLoop[_LoopQueue[_P, _T]] = PerLoop(lambda: _LoopQueue(self))

    async def ask(self, given: _P, *, alone: bool = False) -> _T:
        """Return the answer for one item; `alone` sends no other item with it.

        Raises:
            AgentEnvError: the item has no answer; it has the class of the last attempt's error.
        """
        left_s, num_failed = self.asking.timeout_s, 0
        attempt_s = left_s / 2 if self.asking.retries else left_s
        while True:
            item: _WaitingRequest[_P, _T] = _WaitingRequest(given, min(attempt_s, left_s), alone)
            if self.closed:
                raise closed_error(self.where)
            line = self._lines.here()
            line.put(item)
            try:
                with waiting():
                    await item.started
                found = await item.answer
            finally:
                item.answer.cancel()  # no effect on an answer that is known
                line.left(item)
            if not isinstance(found, AttemptFailure):
                return found
            left_s -= asyncio.get_running_loop().time() - item.since
            again = num_failed > 0 or not self.asking.retries
            if item.sent_with > 1 and left_s > 0.0 and (found.suspect or (found.suspect_if_repeated and again)):
                alone = True
                continue
            num_failed += 1
            pause_s = self.policy.pause_s(found, num_failed, left_s)
            self.num_retried += 1
            add_usage({RM_RETRIED: 1})
            await asyncio.sleep(pause_s)
            left_s -= pause_s

    async def close(self) -> None:
        """Accept no further requests, and fail those of this loop. Calling it again does nothing."""
        self.closed = True
        line = self._lines.drop()
        if line is not None:
            await line.close()


class _LoopQueue(Generic[_P, _T]):
    """The waiting items and running requests of one event loop, without a reference to the loop."""

    def __init__(self, asker: RequestQueue[_P, _T]) -> None:
        self._asker = asker
        self._waiting: deque[_WaitingRequest[_P, _T]] = deque()
        """Those that are sent alone come first."""
        self._sending: dict[asyncio.Task[Any], list[_WaitingRequest[_P, _T]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: _WaitingRequest[_P, _T]) -> None:
        """Queue an item."""
        num_alone = sum(each.alone for each in self._waiting) if item.alone else len(self._waiting)
        self._waiting.insert(num_alone, item)
        self._send_next()

    def left(self, item: _WaitingRequest[_P, _T]) -> None:
        """Note that an item's caller left: a request without waiting callers is cancelled, which makes room."""
        for task, items in self._sending.items():
            if item in items and all(each.is_left for each in items):
                task.cancel()

    async def close(self) -> None:
        """Cancel all requests and fail all waiting items."""
        for item in self._waiting:
            item.settle(closed_error(self._asker.where))
        self._waiting.clear()
        tasks = list(self._sending)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_GRACE_S)

    def _send_next(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._sending) < self._asker.asking.max_concurrent and (items := self._next_items()):
            for item in items:
                item.since, item.sent_with = loop.time(), len(items)
                item.started.set_result(None)
            # In an empty context: the current caller's may have a clock, which other callers would pause.
            task = loop.create_task(self._request(items), context=contextvars.Context())
            self._sending[task] = items
            task.add_done_callback(self._settled)

    def _next_items(self) -> list[_WaitingRequest[_P, _T]]:
        """Return the items of the next request, [] if there are none or they have not waited long enough."""
        while self._waiting and self._waiting[0].is_left:
            self._waiting.popleft()
        if not self._waiting:
            return []
        loop, first = asyncio.get_running_loop(), self._waiting[0]
        most = 1 if first.alone else self._asker.asking.max_batch
        left_s = first.since + self._asker.asking.max_wait_s - loop.time()
        if len(self._waiting) < most and left_s > 0.0:

            def ended() -> None:
                self._timer = None
                self._send_next()

            if self._timer is None:
                self._timer = loop.call_later(left_s, ended)
            return []
        taken: list[_WaitingRequest[_P, _T]] = []
        while self._waiting and len(taken) < most:
            item = self._waiting.popleft()
            taken += [] if item.is_left else [item]
        return taken

    async def _request(self, items: list[_WaitingRequest[_P, _T]]) -> Sequence[_T | AttemptFailure]:
        """Return an answer or a failure for each item."""
        limit_s = min(item.limit_s for item in items)
        found: Sequence[_T | AttemptFailure] | AttemptFailure
        try:
            async with asyncio.timeout(limit_s) as deadline:
                found = await self._asker.send([item.given for item in items])
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = f"{self._asker.where}: expected an answer within {limit_s:.4g} s, got none. Raise timeout_s."
            late = InfraError(message)
            late.__cause__ = error
            found = AttemptFailure(late, retryable=True, suspect=True)
        except AgentEnvError as error:
            found = AttemptFailure(error, retryable=isinstance(error, InfraError), suspect=True)
        return [found] * len(items) if isinstance(found, AttemptFailure) else found

    def _settled(self, task: asyncio.Task[Sequence[_T | AttemptFailure]]) -> None:
        items = self._sending.pop(task)
        error = closed_error(self._asker.where) if task.cancelled() else task.exception()
        for index, item in enumerate(items):
            item.settle(task.result()[index] if error is None else error)
        self._send_next()


class RequestScorer(CountingScorer, Generic[_P, _T]):
    """A scorer over a RequestQueue, with its counts and its end."""

    counts = (*CountingScorer.counts, "num_retried")

    def __init__(self, where: str, send: Send[_P, _T], asking: QueueOptions) -> None:
        super().__init__()
        self.asker: RequestQueue[_P, _T] = RequestQueue(where, send, asking)
        self._helpers: tuple[RequestQueue[Any, Any], ...] = ()
        """Further queues, of what is asked besides scores."""

    @property
    def num_retried(self) -> int:
        """Repeated attempts."""
        return sum(each.num_retried for each in (self.asker, *self._helpers))

    @property
    def patience_s(self) -> float:
        """Longest time to a score without the wait for its turn; the scorer's own error comes earlier."""
        return self.asker.asking.timeout_s + _MARGIN_S

    async def score(self, conversation: Conversation) -> Scored:
        """Return the raw score of a conversation; see `agentenv.rewards.models.types.RewardScorer`.

        Raises:
            DataError: the conversation cannot be scored.
            InfraError: no finite value arrived in time or within the allowed attempts.
            ConfigError: the address, the key, the model or a setting is wrong.
        """
        return await self._counted(conversation)

    async def check_messages(self) -> None:
        """Check that messages can be scored, so that a wrong setting fails once, before many requests.

        Raises:
            ConfigError: they cannot be scored; see `score`.
            InfraError: the server does not answer.
        """

    async def close(self) -> None:
        """Accept no further requests, and fail those of this loop. Calling it again does nothing."""
        for each in (*self._helpers, self.asker):
            await each.close()
