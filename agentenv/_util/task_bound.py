"""TaskBoundContext: an async context manager that may be opened and closed from different tasks."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_CLOSE_LIMIT_S = 20.0
"""Longest that exiting the manager may take before it is cancelled."""


class TaskBoundContext(Generic[_T]):
    """An async context manager that its own task enters and exits, whichever tasks open and close it.

    Code based on anyio needs that: its cancel scopes must be exited in the task that entered them, and `reset` and
    `close` of an environment are called in different tasks.
    """

    def __init__(self, manager: AbstractAsyncContextManager[_T]) -> None:
        self._manager = manager
        self._stop = asyncio.Event()
        self._value: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run())
        """Ends when the manager is closed or fails."""

    async def _run(self) -> None:
        async with self._manager as value:
            self._value.set_result(value)
            await self._stop.wait()

    async def open(self, *, limit_s: float | None = None) -> _T:
        """Return the manager's value; call it once.

        Raises:
            TimeoutError: the value did not arrive in time; the manager is closed.
        """
        both: set[asyncio.Future[Any]] = {self.task, self._value}
        is_cancelled = True
        try:
            await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            is_cancelled = False
        finally:
            if is_cancelled or not self._value.done():  # after a cancellation, no caller would close it
                await self._cancel()
        if self._value.done():
            return self._value.result()
        if not self.task.cancelled() and (error := self.task.exception()) is not None:
            raise error
        raise TimeoutError(f"not open after {limit_s} s")

    async def aclose(self) -> BaseException | None:
        """Exit the manager and return the error that this raised, if any. May be called again."""
        self._stop.set()
        try:
            await asyncio.wait({self.task}, timeout=_CLOSE_LIMIT_S)
        finally:
            if not self.task.done():
                await self._cancel()
        return None if self.task.cancelled() or not self.task.done() else self.task.exception()

    async def _cancel(self) -> None:
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=_CLOSE_LIMIT_S)


def first_error(error: BaseException) -> BaseException:
    """Return the error itself, or the first one in nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
