"""Assign requests to the engines of a pool, and queue requests when all engines are full."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_HOMES = 65_536
"""Number of episodes whose engine is remembered; the cached prefixes of older ones are gone anyway."""


@dataclass(slots=True, eq=False)
class EngineSlot:
    """The slot of an engine. A new engine takes the slot of a dead one."""

    index: int
    engine: Any
    """None while the engine is being replaced."""
    in_flight: int = 0
    num_served: int = 0
    num_blamed: int = 0
    answered_at: float = 0.0
    requests: dict[asyncio.Future[Any], asyncio.Task[Any]] = field(default_factory=dict)
    """Futures of callers, and the engine's calls behind them."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for a free engine."""

    episode: str
    avoid: EngineSlot | None
    place: asyncio.Future[EngineSlot]


class RequestDispatcher:
    """Assigns requests to engines: `enter` takes a place, `leave` frees it."""

    def __init__(self, slots: Sequence[EngineSlot], *, max_in_flight: int, max_skew: int) -> None:
        self._slots, self._max_in_flight, self._max_skew = slots, max_in_flight, max_skew
        self._homes: OrderedDict[str, EngineSlot] = OrderedDict()
        self._waiting: deque[_Waiter] = deque()

    async def enter(self, episode: str, *, avoid: EngineSlot | None = None) -> EngineSlot:
        """Take a place for a turn of an episode; wait in order if all engines are full."""
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
                self.leave(waiter.place.result())  # assigned at the moment of cancellation
            raise

    def leave(self, slot: EngineSlot) -> None:
        """Free a place."""
        slot.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Assign free places to waiting requests, in order."""
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
                break  # all engines are full
        self._waiting.extendleft(reversed(kept))

    def fail_waiting(self, error: Callable[[], Exception]) -> None:
        """Fail all waiting requests."""
        while self._waiting:
            settle(self._waiting.popleft().place, error())

    def _pick(self, episode: str, avoid: EngineSlot | None) -> EngineSlot | None:
        """Return the episode's engine unless it is much busier, otherwise the least busy; None if all are full."""
        if not any(slot.engine is not None and slot is not avoid for slot in self._slots):
            avoid = None  # the engine that failed is the only one left
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
    """Fail a future unless it is done."""
    if not outcome.done():
        outcome.set_exception(error)
