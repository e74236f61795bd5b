"""Which engine of a pool serves a request: places, who has one and who waits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_HOMES = 65_536
"""Episodes whose engine is remembered; of the oldest the cached prefix is gone anyway."""


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one engine, which outlives it."""

    index: int
    engine: Any
    """None while it is being replaced."""
    in_flight: int = 0
    num_served: int = 0
    num_blamed: int = 0
    answered_at: float = 0.0
    requests: dict[asyncio.Future[Any], asyncio.Task[Any]] = field(default_factory=dict)
    """What its callers wait for, and the engine's calls behind that."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that found no room."""

    episode: str
    avoid: Slot | None
    place: asyncio.Future[Slot]


class Dispatch:
    """Hands out places at engines: `enter` takes one, `leave` gives it back."""

    def __init__(self, slots: Sequence[Slot], *, max_in_flight: int, max_skew: int) -> None:
        self._slots, self._max_in_flight, self._max_skew = slots, max_in_flight, max_skew
        self._homes: OrderedDict[str, Slot] = OrderedDict()
        self._waiting: deque[_Waiter] = deque()

    async def enter(self, episode: str, *, avoid: Slot | None = None) -> Slot:
        """Take a place for a turn of an episode, waiting for one where all are taken; first come, first served."""
        if not self._waiting and (slot := self._pick(episode, avoid)) is not None:
            return slot
        waiter = _Waiter(episode, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self.wake()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.place.cancelled() and waiter.place.exception() is None:
                self.leave(waiter.place.result())  # the place came together with the cancellation
            raise

    def leave(self, slot: Slot) -> None:
        """Give a place back, to whoever waits."""
        slot.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Give free places to those who wait, in the order in which they came."""
        kept: deque[_Waiter] = deque()
        while self._waiting:
            waiter = self._waiting.popleft()
            if waiter.place.done():
                continue
            if (slot := self._pick(waiter.episode, waiter.avoid)) is not None:
                waiter.place.set_result(slot)
                continue
            kept.append(waiter)
            if waiter.avoid is None:
                break  # nothing is free
        self._waiting.extendleft(reversed(kept))

    def fail_waiting(self, error: Callable[[], Exception]) -> None:
        """Nobody waits any more."""
        while self._waiting:
            settle(self._waiting.popleft().place, error())

    def _pick(self, episode: str, avoid: Slot | None) -> Slot | None:
        """The episode's own engine unless it is much more loaded, else the least loaded; None where all are full."""
        if not any(slot.engine is not None and slot is not avoid for slot in self._slots):
            avoid = None  # the one that failed is the only one left
        free = [
            slot
            for slot in self._slots
            if slot.engine is not None and slot is not avoid and slot.in_flight < self._max_in_flight
        ]
        if not free:
            return None
        chosen = min(free, key=lambda slot: (slot.in_flight, slot.num_served))
        home = self._homes.get(episode)
        if home in free and home.in_flight <= chosen.in_flight + self._max_skew:
            chosen = home
        if episode:
            self._homes[episode] = chosen
            self._homes.move_to_end(episode)
            if len(self._homes) > _MAX_HOMES:
                self._homes.popitem(last=False)
        chosen.in_flight += 1
        chosen.num_served += 1
        return chosen


def settle(outcome: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future that nobody has settled or given up."""
    if not outcome.done():
        outcome.set_exception(error)
