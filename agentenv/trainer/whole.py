"""Work that is not left in its middle: a train step, a line, a checkpoint. What a thread does goes on anyway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, however often this is cancelled meanwhile; only then is it cancelled.

    A shield alone would not do: whoever awaits it goes on, and the end of the event loop cancels what is inside.

    Raises:
        CancelledError: it was cancelled, and the work came to a good end. What the work raises is raised in any case.
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
