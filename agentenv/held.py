"""Held: an async context manager that whoever likes may open and close, in whatever task."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_CLOSE_LIMIT_S = 20.0
"""Longest that leaving the manager may take before it is cancelled."""


class Held(Generic[_T]):
    """An async context manager that is entered and left in one task of its own, whoever opens and closes it.

    What stands on anyio needs that: its cancel scopes must be left in the task in which they were entered, and an
    environment's `reset` and `close` are called in different ones.
    """

    def __init__(self, manager: AbstractAsyncContextManager[_T]) -> None:
        self._manager = manager
        self._stop = asyncio.Event()
        self._value: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._live())
        """Ends when it is closed, or when what it holds breaks down."""

    async def open(self, *, limit_s: float | None = None) -> _T:
        """What the manager gives; once.

        Raises:
            TimeoutError: it was not there in time; it is closed.
        """
        both: set[asyncio.Future[Any]] = {self.task, self._value}
        is_cancelled = True
        try:
            await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            is_cancelled = False
        finally:
            if is_cancelled or not self._value.done():  # cancelled as it opened, nobody would hold what is open
                await self._end()
        if self._value.done():
            return self._value.result()
        if not self.task.cancelled() and (error := self.task.exception()) is not None:
            raise error
        raise TimeoutError(f"not open after {limit_s} s")

    async def aclose(self) -> BaseException | None:
        """Leave the manager, and give what that raised; again is harmless."""
        self._stop.set()
        try:
            await asyncio.wait({self.task}, timeout=_CLOSE_LIMIT_S)
        finally:
            if not self.task.done():
                await self._end()
        return None if self.task.cancelled() or not self.task.done() else self.task.exception()

    async def _end(self) -> None:
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=_CLOSE_LIMIT_S)

    async def _live(self) -> None:
        async with self._manager as value:
            self._value.set_result(value)
            await self._stop.wait()


def first_error(error: BaseException) -> BaseException:
    """The error itself, or the first one in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
