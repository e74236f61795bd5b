"""Values per event loop: clients and locks of asyncio serve one loop only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

_T = TypeVar("_T")


class PerLoop(Generic[_T]):
    """One value per event loop, made at its first use and dropped with its loop.

    A value that refers to its loop, as a lock or a task does, is dropped when the next loop appears.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[asyncio.AbstractEventLoop, _T] = WeakKeyDictionary()
        self._lock = threading.Lock()  # guards the values: loops may run in several threads

    def here(self) -> _T:
        """Return the value of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._values:
                for ended in [each for each in self._values if each.is_closed()]:
                    del self._values[ended]
                self._values[loop] = self._make()
            return self._values[loop]

    def drop(self) -> _T | None:
        """Remove the value of the running loop and return it, None if there was none."""
        with self._lock:
            return self._values.pop(asyncio.get_running_loop(), None)
