"""Replicas of one reward model: balancing, retries after the death of a replica, and replacement."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentenv._util.calls import retrieve_exception
from agentenv._util.restarts import Restarts
from agentenv.errors import AgentEnvError, DataError, InfraError
from agentenv.rewards.grading import RM_RETRIED, add_usage
from agentenv.rewards.models.actor_lifecycle import WorkerDied
from agentenv.rewards.models.types import Conversation, Scored, closed_error

logger = logging.getLogger(__name__)

ScoreOutcome = Scored | AgentEnvError
ATTEMPTS = 3
"""Replicas that may die while scoring one conversation."""
MAX_OF_A_CALL = 16
"""Conversations per call: concurrent ones share its cost, and none waits for many others' scores."""


class Replica(Protocol):
    """A reward model in another process; all methods are called on one event loop."""

    async def start(self) -> None:
        """Load the model."""

    async def score(self, pickled: Sequence[bytes]) -> Sequence[ScoreOutcome]:
        """Return a score or an error for each conversation.

        Raises:
            WorkerDied: its process is gone.
            InfraError: the call failed, but the process is alive.
        """

    async def close(self) -> None:
        """Release the model and end the process."""

    def kill(self) -> None:
        """End the process at once."""


@dataclass(eq=False, slots=True)
class _PendingConversation:
    """One conversation that waits for a score."""

    pickled: bytes
    future: asyncio.Future[Scored]


@dataclass(eq=False, slots=True)
class _ReplicaState:
    """A running replica."""

    replica: Replica
    lost: asyncio.Future[str]
    """The reason of its death."""
    num_in_flight: int = 0
    num_taken: int = 0
    answered: float = field(default_factory=time.monotonic)
    """Time of its last answer."""
    queue: list[_PendingConversation] = field(default_factory=list)
    """Conversations to send in the loop's next round."""


class ReplicaPool:
    """Sends conversations to the replica with the fewest in flight; used on one event loop.

    A replica that dies, or answers nothing for `timeout_s`, is replaced, and its conversations go to another one, up to
    ATTEMPTS times. A replica that is only slow is kept: its calls of more than `timeout_s` fail.

    Args:
        make: makes the replica with an index, also as a replacement.
        num: number of replicas.
        max_restarts: replacements of all replicas within an hour.
        timeout_s: longest wait for an answer.
        restart_wait_s: wait before a replacement starts; doubles, up to 30 s, for each one of the same index within an
            hour.
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
        self._make = make
        self._timeout_s = timeout_s
        self._places: list[_ReplicaState | None] = [None] * num
        self._restarts = Restarts(max_restarts, wait_s=restart_wait_s)
        self._successors: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._closed = False
        self.num_retried = 0
        """Repeated attempts for conversations."""

    @property
    def num_restarts(self) -> int:
        """Replacements of dead replicas."""
        return self._restarts.num

    @property
    def alive(self) -> list[Replica]:
        """Running replicas."""
        return [life.replica for life in self._places if life is not None]

    async def start(self) -> None:
        """Start all replicas.

        Raises:
            AgentEnvError: one did not start; the others are closed.
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
        self._places[index] = _ReplicaState(replica, asyncio.get_running_loop().create_future())
        self._wake()

    async def score(self, conversation: Conversation) -> Scored:
        """Return a conversation's score.

        Raises:
            DataError: see the replica's scorer; or the conversation cannot be pickled.
            InfraError: no replica is alive, none answered in time, or the replicas that scored it died.
        """
        try:
            pickled = pickle.dumps(conversation)  # here, so that one that cannot be pickled fails alone
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as wrong:
            raise DataError(
                f"conversation: expected text or messages that can be pickled, got {wrong}. Correct it."
            ) from None
        error: WorkerDied | None = None
        for attempt in range(ATTEMPTS):
            self.num_retried += attempt > 0
            add_usage({RM_RETRIED: attempt > 0})
            await self.ready()
            lives = [life for life in self._places if life is not None]
            life = min(lives, key=lambda life: (life.num_in_flight, life.num_taken))
            life.num_in_flight += 1
            life.num_taken += 1
            loop = asyncio.get_running_loop()
            asked = _PendingConversation(pickled, loop.create_future())
            life.queue.append(asked)
            if len(life.queue) == 1:
                loop.call_soon(self._send, life)
            try:
                return await asked.future
            except WorkerDied as died:
                error = died
            finally:
                life.num_in_flight -= 1
        raise InfraError(
            f"RayScorer: expected a score, got the death of {ATTEMPTS} replicas, one after another: {error}"
        ) from error

    async def ready(self) -> None:
        """Wait until a replica runs.

        Raises:
            InfraError: no replica is left to start.
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

    def _send(self, life: _ReplicaState) -> None:
        """Send the queued conversations, spread evenly over calls."""
        asked = [each for each in life.queue if not each.future.done()]
        life.queue.clear()
        num_calls = -(-len(asked) // MAX_OF_A_CALL)
        for first in range(num_calls):
            call = asyncio.ensure_future(self._call(life, asked[first::num_calls]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, life: _ReplicaState, asked: list[_PendingConversation]) -> None:
        began = time.monotonic()
        num_left = len(asked)  # the call is cancelled when no conversation waits for it
        work = asyncio.ensure_future(life.replica.score([each.pickled for each in asked]))
        work.add_done_callback(retrieve_exception)

        def left(_: object) -> None:
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
                if each.future.done():
                    continue
                if isinstance(outcome, Scored):
                    each.future.set_result(outcome)
                else:
                    each.future.set_exception(outcome)
        work.cancel()

    def _outcomes(
        self, life: _ReplicaState, work: asyncio.Future[Sequence[ScoreOutcome]], began: float, num: int
    ) -> Sequence[ScoreOutcome]:
        """Return the outcome of each of a call's conversations."""
        if not work.done() and not life.lost.done() and life.answered >= began:
            late = InfraError(
                f"RayScorer: expected a score within {self._timeout_s:g} s, got none from a replica that still "
                "answers others. Score fewer at once, or raise timeout_s."
            )
            return [late] * num
        if not work.done():
            if not life.lost.done():
                self._lose(life, f"it answered nothing for {self._timeout_s:g} s.")
            return [WorkerDied(f"RayScorer: expected a living replica, got its death: {life.lost.result()}")] * num
        error = work.exception()
        if error is None:
            life.answered = time.monotonic()
            outcomes = work.result()
            if len(outcomes) == num:
                self._look_for_death(life, outcomes)
                return outcomes
            error = InfraError(f"RayScorer: expected {num} outcomes of a replica, got {len(outcomes)}. Fix its scorer.")
        if not isinstance(error, AgentEnvError):
            error = InfraError(f"RayScorer: expected scores of a replica, got {type(error).__name__}: {error}")
        self._look_for_death(life, [error])
        return [error] * num

    def _look_for_death(self, life: _ReplicaState, outcomes: Sequence[ScoreOutcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, WorkerDied):
                self._lose(life, str(outcome))

    # --- life and death -----------------------------------------------------------------------------------------------

    def _lose(self, life: _ReplicaState, reason: str) -> None:
        """Remove a replica and start its replacement."""
        if life.lost.done() or self._closed:
            return  # already handled
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
        """End all replicas; waiting callers get an InfraError."""
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
