"""Run work to completion in spite of cancellation: a train step, a log line, a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, even if this is cancelled meanwhile; then raise the cancellation.

    `asyncio.shield` is not enough: its caller continues, and the end of the event loop cancels the work.

    Raises:
        CancelledError: this was cancelled and the work succeeded. Errors of the work are always raised.
    """
    task, is_cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    result = task.result()
    if is_cancelled:
        raise asyncio.CancelledError
    return result
