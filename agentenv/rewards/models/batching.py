"""Dynamic micro-batching: callers ask about one sequence each, a worker thread scores those that wait together.

What waits is sorted by length and cut into batches of sequences that are nearly as long as each other, so little is
padding; those who asked meanwhile are the next ones. While nothing is computed, nobody waits longer than `max_wait_s`.
A batch that fails is split until what fails is single sequences: the others have their scores.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from agentenv.errors import AgentEnvError, InfraError
from agentenv.rewards._arguments import number, whole_number
from agentenv.types import MAX_REWARD

ScoreBatch = Callable[[list[list[int]]], Sequence[float]]
"""One number per sequence of token ids, in order; called in one thread, never twice at once."""
Plan = Callable[[list[list[int]], int, int], list[list[int]]]
"""Sequences, most of them and most tokens of a batch: batches of indices, every one in exactly one of them."""
_T = TypeVar("_T")
TOKENS_OF_A_CALL = 256
"""What one more batch costs, in tokens: small models on a CPU take as long for it as for 100 to 300 of them."""
_BATCHES_AT_ONCE = 8
"""Full batches that are sorted together: with more, the first would wait long for the rendering of the last."""
_CLOSE_GRACE_S = 10.0


@dataclass(eq=False, slots=True)
class _Item:
    """One sequence, and who waits for its score."""

    given: Sequence[int] | Callable[[], Sequence[int]]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[float]
    asked: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    """Known to the worker, once it has taken the item."""


class MicroBatcher:
    """Scores sequences of token ids in batches formed of what many callers, on any event loops, ask at once.

    Args:
        score_batch: what scores a batch; see ScoreBatch.
        max_batch: most sequences of one batch.
        max_batch_tokens: most tokens of one batch, padding included; a longer sequence is a batch of its own.
        max_wait_s: how long a sequence may wait for others while nothing is computed.
        plan: gives the batches, of indices, of the sequences that wait, from them and the two limits; by default
            `batches` of their lengths.

    The thread starts at the first call. A caller that is cancelled before its batch begins is not scored.
    """

    def __init__(
        self,
        score_batch: ScoreBatch,
        *,
        max_batch: int = 32,
        max_batch_tokens: int = 16_384,
        max_wait_s: float = 0.005,
        plan: Plan | None = None,
    ) -> None:
        where = type(self).__name__
        self._plan = plan or _by_length
        self._score_batch = score_batch
        self._max_batch = whole_number(f"{where}.max_batch", max_batch, low=1)
        self.max_batch_tokens = whole_number(f"{where}.max_batch_tokens", max_batch_tokens, low=1)
        """May be changed at any time."""
        self._max_wait_s = number(f"{where}.max_wait_s", max_wait_s, low=0.0, high=3600.0)
        self._changed = threading.Condition()  # guards the four below; what follows them is the worker's
        self._asked: set[_Item] = set()
        """All who wait for a score."""
        self._queue: list[_Item] = []
        """Those among them whom the worker has not taken."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._batch: list[_Item] = []
        """What the worker computes."""
        self.num_batches = self.num_scored = self.num_failed = 0
        """Calls of `score_batch`; sequences that have their score; sequences that have none."""

    @property
    def num_waiting(self) -> int:
        """Sequences that somebody waits for the score of."""
        return len(self._asked)

    async def score(self, token_ids: Sequence[int] | Callable[[], Sequence[int]]) -> float:
        """The score of one sequence; finite. A function that gives the ids is called in the worker's thread.

        Raises:
            InfraError: it could not be computed, is no finite number, or the batcher was closed.
            AgentEnvError: what the function, or `score_batch` for this sequence alone, raised.
        """
        loop = asyncio.get_running_loop()
        item = _Item(token_ids, loop, loop.create_future())
        with self._changed:
            if self._closed:
                raise _closed()
            self._asked.add(item)
            self._queue.append(item)
            if self._thread is None or not self._thread.is_alive():  # the first, or forked: threads stay behind
                self._thread = threading.Thread(target=self._work, name="agentenv-rm", daemon=True)
                self._thread.start()
                atexit.register(self._end)
            if len(self._queue) in (1, self._max_batch):  # what the worker waits for
                self._changed.notify()
        try:
            return await item.future
        finally:
            self._asked.discard(item)

    async def close(self) -> None:
        """End the thread; a batch that is being computed is waited for, a while. All others get an InfraError."""
        with self._changed:
            self._closed = True
            thread, waiting = self._thread, self._asked.difference(self._batch)
            self._changed.notify()
        atexit.unregister(self._end)
        _hand_over([(item, _closed()) for item in waiting])
        if thread is not None:
            await asyncio.to_thread(thread.join, _CLOSE_GRACE_S)
        _hand_over([(item, _closed()) for item in list(self._asked)])

    def _end(self) -> None:
        """At the end of a process in which nobody closed it, which torch would abort while the thread computes."""
        if self._thread is None or not self._thread.is_alive():  # or forked
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_GRACE_S)

    def _work(self) -> None:
        while items := self._taken():
            items = self._prepared(items)
            for batch in self._planned([item.ids for item in items]):
                if self._closed:
                    break
                self._batch = [items[index] for index in batch]
                _hand_over(self._scored(self._batch))

    def _taken(self) -> list[_Item]:
        """The first of the queue, once they have waited long enough; empty at the end."""
        with self._changed:
            while not self._closed:
                self._queue = [item for item in self._queue if not item.future.done()]
                left_s = self._left_s()
                if left_s is not None and left_s <= 0.0:
                    break
                self._changed.wait(left_s)
            most = _BATCHES_AT_ONCE * self._max_batch
            taken, self._queue = self._queue[:most], self._queue[most:]
            return [] if self._closed else taken

    def _left_s(self) -> float | None:
        """How much longer to wait for company; None where nobody waits."""
        if not self._queue:
            return None
        if len(self._queue) >= self._max_batch:
            return 0.0
        return self._queue[0].asked + self._max_wait_s - time.monotonic()

    def _prepared(self, items: list[_Item]) -> list[_Item]:
        """The items whose ids are known; who waits for another hears why they are not."""
        known: list[_Item] = []
        failed: list[tuple[_Item, float | AgentEnvError]] = []
        for item in items:
            found = _attempted(item.given) if callable(item.given) else item.given
            if isinstance(found, AgentEnvError):
                failed.append((item, found))
            else:
                item.ids = list(found)
                known.append(item)
        self.num_failed += len(failed)
        _hand_over(failed)
        return known

    def _planned(self, sequences: list[list[int]]) -> list[list[int]]:
        """Batches, whatever becomes of the plan: who waits must not wait for ever."""
        found = _attempted(lambda: self._plan(sequences, self._max_batch, self.max_batch_tokens))
        if isinstance(found, AgentEnvError):
            return _by_length(sequences, self._max_batch, self.max_batch_tokens)
        return found

    def _scored(self, items: list[_Item]) -> list[tuple[_Item, float | AgentEnvError]]:
        """Scores or errors of the items; who was cancelled meanwhile is left out of what is computed again."""
        items = [item for item in items if not item.future.done()]
        if not items:
            return []
        self.num_batches += 1
        found = _attempted(lambda: _numbers(self._score_batch([item.ids for item in items]), len(items)))
        if isinstance(found, AgentEnvError) and len(items) > 1:
            half = len(items) // 2
            return self._scored(items[:half]) + self._scored(items[half:])
        values = [found] if isinstance(found, AgentEnvError) else [_finite(value) for value in found]
        num_failed = sum(isinstance(value, AgentEnvError) for value in values)
        self.num_failed, self.num_scored = self.num_failed + num_failed, self.num_scored + len(values) - num_failed
        return list(zip(items, values, strict=True))


def batches(lengths: Sequence[int], max_batch: int, max_tokens: int) -> list[list[int]]:
    """The indices of sequences of these lengths, in batches; every one in exactly one of them, the longest first.

    A batch has at most `max_batch` sequences and `max_tokens` tokens, padding included, but for a single one that is
    longer. Of all ways to cut the sorted lengths it is the one with the least to compute, padding and calls together.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    least, begin = [0], [0]  # of the first 0, 1, … in the order: what they cost, where their last batch begins
    for end in range(1, len(order) + 1):
        least.append(least[end - 1] + lengths[order[end - 1]] + TOKENS_OF_A_CALL)
        begin.append(end - 1)
        for start in range(end - 2, max(end - max_batch, 0) - 1, -1):
            num_tokens = (end - start) * lengths[order[start]]
            if num_tokens > max_tokens:
                break
            if least[start] + num_tokens + TOKENS_OF_A_CALL < least[end]:
                least[end], begin[end] = least[start] + num_tokens + TOKENS_OF_A_CALL, start
    found, end = [], len(order)
    while end:
        found.append(order[begin[end] : end])
        end = begin[end]
    return found[::-1]


def _by_length(sequences: list[list[int]], max_batch: int, max_tokens: int) -> list[list[int]]:
    return batches([len(ids) for ids in sequences], max_batch, max_tokens)


def _attempted(function: Callable[[], _T]) -> _T | AgentEnvError:
    """What a function gives; what it raises is carried to the callers, in their threads."""
    try:
        return function()
    except AgentEnvError as error:
        return error
    except Exception as error:  # noqa: BLE001 - see above
        return InfraError(f"reward model: expected scores, got {type(error).__name__}: {error}"[:500])


def _numbers(values: Sequence[float], num: int) -> list[float]:
    found = [float(value) for value in values]
    if len(found) != num:
        raise InfraError(f"reward model: expected {num} scores, got {len(found)}. Mend what scores.")
    return found


def _finite(value: float) -> float | AgentEnvError:
    if math.isfinite(value) and abs(value) <= MAX_REWARD:
        return value
    return InfraError(f"reward model: expected a finite score, got {value!r}. Look at its weights and its dtype.")


def _closed() -> InfraError:
    return InfraError("reward model: expected an open scorer, got a closed one. Close it after the last episode.")


def _hand_over(results: list[tuple[_Item, float | AgentEnvError]]) -> None:
    """Wake those who wait, each event loop once."""
    by_loop = defaultdict(list)
    for item, value in results:
        by_loop[item.loop].append((item.future, value))
    for loop, settled in by_loop.items():
        with suppress(RuntimeError):  # the loop has ended, and nobody waits there
            loop.call_soon_threadsafe(_settle, settled)


def _settle(results: list[tuple[asyncio.Future[float], float | AgentEnvError]]) -> None:
    for future, value in results:
        if future.done():
            continue
        if isinstance(value, AgentEnvError):
            future.set_exception(value)
        else:
            future.set_result(value)
