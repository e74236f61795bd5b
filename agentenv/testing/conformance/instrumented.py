"""InstrumentedCoroutine: a coroutine with callbacks where it resumes, pauses and waits, for cancellation and timing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any


def _do_nothing() -> None:
    pass


class InstrumentedCoroutine(Coroutine[Any, Any, Any]):
    """The same coroutine, with a callback before each stretch (`on_resume`), after it (`on_pause`) and at each wait.

    A stretch is the code between two waits, during which nothing else runs on the event loop. `on_wait` is called after
    `on_pause` if the coroutine waits, but not if it has ended.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        on_resume: Callable[[], None] = _do_nothing,
        on_pause: Callable[[], None] = _do_nothing,
        on_wait: Callable[[], None] = _do_nothing,
    ) -> None:
        self._work = work
        self._on_resume = on_resume
        self._on_pause = on_pause
        self._on_wait = on_wait

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        self._on_resume()
        try:
            waited_for = self._work.send(value)
        finally:
            self._on_pause()
        self._on_wait()
        return waited_for

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        self._on_resume()
        try:
            waited_for = self._work.throw(*error)
        finally:
            self._on_pause()
        self._on_wait()
        return waited_for

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._work.close()

    def __await__(self) -> InstrumentedCoroutine:
        return self

    def __iter__(self) -> InstrumentedCoroutine:
        return self

    def __next__(self) -> Any:
        return self.send(None)
