"""Objects that all episodes of a process share, such as a reward model: created once, closed with the last event loop.

An environment is not notified when a run ends. An event loop notifies its asynchronous generators at its end
(`loop.shutdown_asyncgens`, which `asyncio.run` calls): one that waits until then closes the shared objects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
CLOSE_LIMIT_S = 30.0
"""Longest time that closing may delay the end of a program."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[_T]):
    """One shared object and the loops that use it."""

    settings: Any
    value: _T
    is_ours: bool
    loops: WeakSet[asyncio.AbstractEventLoop] = field(default_factory=WeakSet)


class Shared(Generic[_T]):
    """Objects by their settings: one for equal JSON, or for the same object.

    An object created from JSON is closed at the end of the last loop that used it, and created again for another loop.
    An object created from other objects may contain the caller's, so the caller closes it.
    """

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make = make
        self._lock = threading.Lock()  # guards the attributes below: loops may run in several threads
        self._entries: dict[Any, _Entry[_T]] = {}
        self._keepers: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = WeakKeyDictionary()

    def get(self, settings: Any) -> _T:
        """Return the object for these settings."""
        with self._lock:
            return self._entry(settings).value

    async def open(self, settings: Any) -> _T:
        """Return the object for these settings and keep it open until the running loop ends."""
        loop = asyncio.get_running_loop()
        with self._lock:
            entry = self._entry(settings)
            entry.loops.add(loop)
            if loop in self._keepers:
                return entry.value
            keeper = self._keepers[loop] = self._close_at_loop_end()
        await anext(keeper)
        return entry.value

    def _entry(self, settings: Any) -> _Entry[_T]:
        try:
            key, is_ours = json.dumps(settings, sort_keys=True), True
        except (TypeError, ValueError):
            key, is_ours = f"object {id(settings)}", False  # the entry keeps the object alive
        if key not in self._entries:
            self._entries[key] = _Entry(settings, self._make(settings), is_ours)
        return self._entries[key]

    async def _close_at_loop_end(self) -> AsyncGenerator[None, None]:
        """Wait for the end of the loop, and close what no other loop uses."""
        try:
            yield
        finally:
            loop = asyncio.get_running_loop()
            parts: list[Any] = []
            with self._lock:
                self._keepers.pop(loop, None)
                for key, entry in list(self._entries.items()):
                    entry.loops.discard(loop)
                    if entry.is_ours and all(other.is_closed() for other in entry.loops):
                        held = list(closable(entry.value))
                        parts += held
                        if held:
                            del self._entries[key]
            closing = {asyncio.ensure_future(part.close()): part for part in parts}
            if closing:
                await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)
            for task, part in closing.items():
                ended = task.done() and not task.cancelled()
                error = task.exception() if ended else TimeoutError(f"not closed within {CLOSE_LIMIT_S:g} s")
                name, metrics = type(part).__name__, getattr(part, "metrics", dict)
                figures = ", ".join(f"{key} {value:g}" for key, value in metrics().items())
                logger.info("rm_chat: %s closed: %s", name, figures)
                if error is not None:
                    logger.warning("rm_chat: expected %s to close, got %s: %s.", name, type(error).__name__, error)
                task.cancel()


def closable(value: Any) -> Iterator[Any]:
    """Yield the parts of a reward or a judge that can be closed: itself, its scorer or judge, or those of its parts."""
    if hasattr(value, "close"):
        yield value
        return
    for name in ("scorer", "judge"):
        if hasattr(part := getattr(value, name, None), "close"):
            yield part
    if hasattr(value, "reward"):  # a reward that wraps another
        yield from closable(value.reward)
    for term in getattr(value, "terms", {}).values():
        yield from closable(term.reward)
    for reward in getattr(value, "rewards", {}).values():
        yield from closable(reward)
