"""Bodies in JSON, read so that the event loop continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from json import scanner
from typing import Any

from agentenv._util.calls import call, waiting
from agentenv._util.per_loop import PerLoop

MAX_AT_ONCE = 65_536
"""Bytes that are read on the event loop."""
MAX_LEVELS = 100
_ONE_AT_A_TIME = PerLoop(lambda: asyncio.Semaphore(1))


class _PythonDecoder(json.JSONDecoder):
    """A reader of JSON without the scanner that is written in C."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def parse_json(body: bytes) -> Any:
    """Return the value of a body.

    A body of more than MAX_AT_ONCE bytes is read by Python code, which is slow but lets other threads run: the C reader
    blocks them for 0.1 s for a megabyte of empty lists.

    Raises:
        ValueError: it is not JSON, or has more than MAX_LEVELS levels, which recursive code cannot take.
    """
    try:
        value = json.loads(body, cls=None if len(body) <= MAX_AT_ONCE else _PythonDecoder)
    except RecursionError as error:
        raise ValueError(f"more than {MAX_LEVELS} levels") from error
    level = [value]
    for _ in range(MAX_LEVELS):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_LEVELS} levels")


async def parse_body(body: bytes, read: Callable[[bytes], Any] = parse_json) -> Any:
    """Return what `read` returns for a body, called in a thread if the body is large.

    Waiting for the large bodies before it does not count toward time limits.
    """
    if len(body) <= MAX_AT_ONCE:
        return read(body)
    free = _ONE_AT_A_TIME.here()
    with waiting():
        await free.acquire()
    try:
        return await call(read, body)
    finally:
        free.release()
