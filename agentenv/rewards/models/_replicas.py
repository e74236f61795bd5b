"""Replicas of one reward model: which is asked, what becomes of those whom it leaves waiting, and who follows it."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentenv.errors import AgentEnvError, DataError, InfraError
from agentenv.restarts import Restarts
from agentenv.rewards.models._counting import closed_error
from agentenv.rewards.models._home import Died
from agentenv.rewards.models.types import Conversation, Scored
from agentenv.rewards.spent import RM_RETRIED, spend

logger = logging.getLogger(__name__)

Outcome = Scored | AgentEnvError
ATTEMPTS = 3
"""Replicas that may die of one conversation."""
MAX_OF_A_CALL = 16
"""Conversations that travel together: those asked about at once. What one call costs is shared, and none of them waits
for many others' scores."""


class Replica(Protocol):
    """A reward model in another process; all methods are called on one event loop."""

    async def start(self) -> None:
        """Load the model."""

    async def score(self, pickled: Sequence[bytes]) -> Sequence[Outcome]:
        """What the model says of each conversation.

        Raises:
            Died: its process is gone.
            InfraError: the call failed, and the process lives.
        """

    async def close(self) -> None:
        """Free what it holds, and end it."""

    def kill(self) -> None:
        """End it, whatever it does."""


@dataclass(eq=False, slots=True)
class _Asked:
    """One conversation on its way."""

    pickled: bytes
    future: asyncio.Future[Scored]


@dataclass(eq=False, slots=True)
class _Life:
    """One replica from its start to its death."""

    replica: Replica
    lost: asyncio.Future[str]
    """Why it is gone."""
    num_in_flight: int = 0
    num_taken: int = 0
    answered: float = field(default_factory=time.monotonic)
    """When it last did."""
    queue: list[_Asked] = field(default_factory=list)
    """Asked since the event loop last came by."""


class ReplicaPool:
    """Asks the replica that has the fewest conversations in flight; lives on one event loop.

    A replica that dies, or that answers nothing for `timeout_s`, is replaced, and whom it left waiting ask another, up
    to ATTEMPTS times. One that is only slow stays: its calls of more than `timeout_s` fail.

    Args:
        make: makes the replica of an index; it is called again for its successors.
        num: how many.
        max_restarts: successors within an hour, of all together.
        timeout_s: longest wait for an answer.
        restart_wait_s: before a successor starts; doubled, up to 30 s, for each one of the same place within an hour.
    """

    def __init__(
        self,
        make: Callable[[int], Replica],
        num: int,
        *,
        max_restarts: int,
        timeout_s: float,
        restart_wait_s: float = 0.5,
    ) -> None:
        self._make, self._timeout_s = make, timeout_s
        self._places: list[_Life | None] = [None] * num
        self._restarts = Restarts(max_restarts, wait_s=restart_wait_s)
        self._successors: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._closed = False
        self.num_retried = 0
        """Times that a conversation was asked about again."""

    @property
    def num_restarts(self) -> int:
        """Replicas that took the place of others."""
        return self._restarts.num

    @property
    def alive(self) -> list[Replica]:
        """Those that can be asked."""
        return [life.replica for life in self._places if life is not None]

    async def start(self) -> None:
        """Start all replicas.

        Raises:
            AgentEnvError: one did not; the others are closed.
        """
        results = await asyncio.gather(*map(self._start, range(len(self._places))), return_exceptions=True)
        wrong = [result for result in results if isinstance(result, BaseException)]
        if wrong:
            await self._close_all()
            raise next((each for each in wrong if not isinstance(each, InfraError)), wrong[0])

    async def _start(self, index: int) -> None:
        replica = self._make(index)
        try:
            await replica.start()
        except BaseException:
            replica.kill()
            raise
        self._places[index] = _Life(replica, asyncio.get_running_loop().create_future())
        self._wake()

    async def score(self, conversation: Conversation) -> Scored:
        """What a replica says of a conversation.

        Raises:
            DataError: see the replica's scorer; or it cannot be pickled.
            InfraError: no replica lives, none answered in time, or its replicas died.
        """
        asked = _pickled(conversation)
        error: Died | None = None
        for attempt in range(ATTEMPTS):
            self.num_retried += attempt > 0
            spend({RM_RETRIED: attempt > 0})
            try:
                return await self._ask(await self._least(), asked)
            except Died as died:
                error = died
        raise InfraError(
            f"RayScorer: expected a score, got the death of {ATTEMPTS} replicas, one after another: {error}"
        ) from error

    async def ready(self) -> None:
        """Wait until a replica lives.

        Raises:
            InfraError: none will.
        """
        while not any(self._places):
            if self._closed:
                raise closed_error("RayScorer")
            if not self._successors:
                raise InfraError(
                    f"RayScorer: expected a living replica, got none of {len(self._places)} after "
                    f"{self.num_restarts} restarts. Find out why they die, or raise max_restarts."
                )
            self._changed.clear()
            await self._changed.wait()

    async def _least(self) -> _Life:
        await self.ready()
        lives = [life for life in self._places if life is not None]
        return min(lives, key=lambda life: (life.num_in_flight, life.num_taken))

    async def _ask(self, life: _Life, pickled: bytes) -> Scored:
        asked = _Asked(pickled, asyncio.get_running_loop().create_future())
        life.num_in_flight += 1
        life.num_taken += 1
        life.queue.append(asked)
        if len(life.queue) == 1:
            asyncio.get_running_loop().call_soon(self._send, life)
        try:
            return await asked.future
        finally:
            life.num_in_flight -= 1

    def _send(self, life: _Life) -> None:
        """Those who asked since the loop last came by, in calls."""
        asked = [each for each in life.queue if not each.future.done()]
        life.queue.clear()
        num_calls = -(-len(asked) // MAX_OF_A_CALL)
        for first in range(num_calls):
            call = asyncio.ensure_future(self._call(life, asked[first::num_calls]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, life: _Life, asked: list[_Asked]) -> None:
        began, num_left = time.monotonic(), len(asked)
        work = asyncio.ensure_future(life.replica.score([each.pickled for each in asked]))
        work.add_done_callback(_heard)

        def left(_: object) -> None:
            """One more has its score, or was given up: with the last of them goes the call."""
            nonlocal num_left
            num_left -= 1
            if not num_left:
                work.cancel()

        for each in asked:
            each.future.add_done_callback(left)
        awaited: set[asyncio.Future[Any]] = {work, life.lost}
        await asyncio.wait(awaited, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not (work.done() and work.cancelled()):
            for each, outcome in zip(asked, self._outcomes(life, work, began, len(asked)), strict=True):
                _settle(each.future, outcome)
        work.cancel()

    def _outcomes(
        self, life: _Life, work: asyncio.Future[Sequence[Outcome]], began: float, num: int
    ) -> Sequence[Outcome]:
        """One for each of a call's conversations, whatever came of it."""
        if not work.done():
            return [self._unanswered(life, began)] * num
        error = work.exception()
        if error is None:
            life.answered = time.monotonic()
            outcomes = work.result()
            if len(outcomes) == num:
                self._look_for_death(life, outcomes)
                return outcomes
            error = InfraError(f"RayScorer: expected {num} outcomes of a replica, got {len(outcomes)}. Mend it.")
        if not isinstance(error, AgentEnvError):
            error = InfraError(f"RayScorer: expected scores of a replica, got {type(error).__name__}: {error}")
        self._look_for_death(life, [error])
        return [error] * num

    def _unanswered(self, life: _Life, began: float) -> AgentEnvError:
        """Of a call that was waited for long enough, or whose replica is gone."""
        if not life.lost.done() and life.answered >= began:
            return InfraError(
                f"RayScorer: expected a score within {self._timeout_s:g} s, got none of a replica that still gives "
                "others. Ask about fewer at once, or raise timeout_s."
            )
        if not life.lost.done():
            self._lose(life, f"it answered nothing for {self._timeout_s:g} s.")
        return Died(f"RayScorer: expected a living replica, got its death: {life.lost.result()}")

    def _look_for_death(self, life: _Life, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Died):
                self._lose(life, str(outcome))

    # --- life and death -----------------------------------------------------------------------------------------------

    def _lose(self, life: _Life, reason: str) -> None:
        """Take a replica out, and have it replaced."""
        if life.lost.done() or self._closed:
            return  # others noticed before
        life.lost.set_result(reason)
        life.replica.kill()
        index = self._places.index(life)
        self._places[index] = None
        logger.warning("replica %d of a reward model is lost: %s", index, reason)
        successor = asyncio.ensure_future(self._replace(index))
        self._successors.add(successor)
        successor.add_done_callback(self._replaced)

    async def _replace(self, index: int) -> None:
        while (wait_s := self._restarts.spend(index)) is not None:
            await asyncio.sleep(wait_s)
            try:
                await self._start(index)
                return
            except AgentEnvError as error:
                logger.warning("replica %d of a reward model did not start again: %s", index, error)

    def _replaced(self, successor: asyncio.Task[None]) -> None:
        self._successors.discard(successor)
        self._wake()
        if not successor.cancelled() and (error := successor.exception()) is not None:
            logger.error("a replica of a reward model was not replaced: %r", error)

    async def close(self) -> None:
        """End all replicas; who still waits gets an InfraError."""
        self._closed = True
        for successor in self._successors:
            successor.cancel()
        self._wake()
        await self._close_all()

    async def _close_all(self) -> None:
        lives, self._places = [life for life in self._places if life is not None], [None] * len(self._places)
        for life in lives:
            if not life.lost.done():
                life.lost.set_result("it was closed.")
        await asyncio.gather(*(life.replica.close() for life in lives))

    def _wake(self) -> None:
        self._changed.set()


def _pickled(conversation: Conversation) -> bytes:
    """By itself: one that cannot travel fails alone."""
    try:
        return pickle.dumps(conversation)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"conversation: expected text or messages that can be pickled, got {error}. Correct it."
        ) from None


def _settle(future: asyncio.Future[Scored], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Scored):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _heard(work: asyncio.Future[Sequence[Outcome]]) -> None:
    # Of a call to a replica that is lost nobody asks for the exception, which asyncio would complain about.
    if not work.cancelled():
        work.exception()
