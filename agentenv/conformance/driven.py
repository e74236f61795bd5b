"""Driven: a coroutine that says when it goes on and when it waits; what cancelling and timing stand on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any


def _nothing() -> None:
    """No one listens."""


class Driven(Coroutine[Any, Any, Any]):
    """The same coroutine: `goes_on` is called before each of its stretches, and `waits` where one ends in a wait.

    A stretch is what runs between two waits, in which nothing else on the event loop does.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        goes_on: Callable[[], None] = _nothing,
        waits: Callable[[], None] = _nothing,
        ends: Callable[[], None] = _nothing,
    ) -> None:
        self._work, self._goes_on, self._waits, self._ends = work, goes_on, waits, ends

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        self._goes_on()
        try:
            waited_for = self._work.send(value)
        finally:
            self._ends()
        self._waits()
        return waited_for

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        self._goes_on()
        try:
            waited_for = self._work.throw(*error)
        finally:
            self._ends()
        self._waits()
        return waited_for

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._work.close()

    def __await__(self) -> Driven:
        return self

    def __iter__(self) -> Driven:
        return self

    def __next__(self) -> Any:
        return self.send(None)
