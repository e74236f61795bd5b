"""Work on foreign data beside the event loop: a client or a program that sends much of it delays no one else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from agentenv._util.calls import call, waiting
from agentenv._util.per_loop import PerLoop

_Result = TypeVar("_Result")

MAX_AT_ONCE = 32_768
"""Bytes or characters that are handled on the event loop: they take less time than a change of threads is worth."""
_ONE_AT_A_TIME = PerLoop(lambda: asyncio.Semaphore(1))


def size_of(value: Any) -> int:
    """Return about how many characters or bytes a value has, counted a little beyond MAX_AT_ONCE and no further."""
    size, todo = 0, [value]
    while todo and size <= MAX_AT_ONCE:
        item = todo.pop()
        size += len(item) if isinstance(item, str | bytes) else 1
        if isinstance(item, Mapping):
            todo += item
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
    return size


async def off_loop(size: int, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Return the function's result for an input of this size, called in a thread if that is large.

    One thread at a time: several would slow down each other, and the loop. Waiting for the ones before it does not
    count toward time limits. A single call of C code that takes long stops the loop from a thread, too.

    Raises:
        InfraError: no thread could be started.
    """
    if size <= MAX_AT_ONCE:
        return function(*args, **kwargs)
    free = _ONE_AT_A_TIME.here()
    with waiting():
        await free.acquire()
    try:
        return await call(partial(function, *args, **kwargs))  # type: ignore[no-any-return]
    finally:
        free.release()
