"""What all episodes of a process share, such as a reward model: made once, and closed when its last event loop ends.

Nothing tells an environment that a run is over. What an event loop does tell, at its end, is its asynchronous
generators (`loop.shutdown_asyncgens`, which `asyncio.run` calls): one that sleeps until then closes what was shared.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
CLOSE_LIMIT_S = 30.0
"""Longest that closing may hold up the end of a program."""


class _Entry(Generic[_T]):
    """One shared thing, and the loops that use it."""

    def __init__(self, settings: Any, value: _T, *, is_ours: bool) -> None:
        self.settings, self.value, self.is_ours = settings, value, is_ours
        self.loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    @property
    def is_left(self) -> bool:
        """Whether all loops that used it have ended."""
        return all(loop.is_closed() for loop in self.loops)


class Shared(Generic[_T]):
    """Things by the settings that they are made from: one for equal JSON, or for the same object.

    What was made from JSON is closed at the end of the last loop that used it, and made anew for another; what was made
    from objects holds what is the caller's, and is left to them.
    """

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make = make
        self._lock = threading.Lock()  # guards what follows: loops may run in several threads
        self._entries: dict[Any, _Entry[_T]] = {}
        self._keepers: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = WeakKeyDictionary()

    def made(self, settings: Any) -> _T:
        """What these settings mean."""
        with self._lock:
            return self._entry(settings).value

    async def held(self, settings: Any) -> _T:
        """The same, kept open as long as the running loop lasts."""
        loop = asyncio.get_running_loop()
        with self._lock:
            entry = self._entry(settings)
            entry.loops.add(loop)
            if loop in self._keepers:
                return entry.value
            keeper = self._keepers[loop] = self._until_the_end()
        await anext(keeper)
        return entry.value

    def _entry(self, settings: Any) -> _Entry[_T]:
        try:
            key, is_ours = json.dumps(settings, sort_keys=True), True
        except (TypeError, ValueError):
            key, is_ours = f"object {id(settings)}", False  # which the entry keeps alive
        if key not in self._entries:
            self._entries[key] = _Entry(settings, self._make(settings), is_ours=is_ours)
        return self._entries[key]

    async def _until_the_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Close what no other loop uses."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._keepers.pop(loop, None)
            for entry in self._entries.values():
                entry.loops.discard(loop)
            left = {key: list(closable(e.value)) for key, e in self._entries.items() if e.is_left and e.is_ours}
            parts = [part for key in left for part in left[key]]
            for key in left:
                if left[key]:
                    del self._entries[key]
        closing = {asyncio.ensure_future(part.close()): part for part in parts}
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)
        for task, part in closing.items():
            ended = task.done() and not task.cancelled()
            _tell(part, task.exception() if ended else TimeoutError(f"no end within {CLOSE_LIMIT_S:g} s"))
            task.cancel()


def closable(value: Any) -> Iterator[Any]:
    """What holds something, in a reward or a judge: itself, its scorer or judge, or those of what it is made of."""
    if hasattr(value, "close"):
        yield value
        return
    for name in ("scorer", "judge"):
        if hasattr(part := getattr(value, name, None), "close"):
            yield part
    if hasattr(value, "reward"):  # which it normalises
        yield from closable(value.reward)
    for term in getattr(value, "terms", {}).values():
        yield from closable(term.reward)
    for reward in getattr(value, "rewards", {}).values():
        yield from closable(reward)


def _tell(part: Any, error: BaseException | None) -> None:
    """Log what it counted, and what stood in the way of its end."""
    name, metrics = type(part).__name__, getattr(part, "metrics", None)
    figures = metrics() if callable(metrics) else {}
    logger.info("rm_chat: %s at its end: %s", name, ", ".join(f"{key} {value:g}" for key, value in figures.items()))
    if error is not None:
        logger.warning("rm_chat: expected %s to close, got %s: %s.", name, type(error).__name__, error)
