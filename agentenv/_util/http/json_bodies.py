"""JSON, read and written so that the event loop continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from json import decoder, scanner
from typing import Any, TypeVar

from agentenv._util.off_loop import MAX_AT_ONCE, off_loop, size_of

T = TypeVar("T")
MAX_LEVELS = 100
MAX_PARTS = 100_000
"""Commas and brackets that the reader written in C takes at once: 0.03 s, in which no other thread runs."""
_MAX_INTEGERS_BYTES = 1 << 20
"""Integers of 4,300 digits that the reader written in C takes at once: 0.03 s."""
MAX_CONTAINERS = 500_000
"""Lists and objects of a body: a garbage collection looks at all of them while everything stands still, for 0.07 s."""


class _PythonDecoder(json.JSONDecoder):
    """A reader of JSON without the scanner that is written in C; it counts lists and objects."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_in_steps)
        self.num_containers = 0
        self.parse_object = self._counted(decoder.JSONObject)  # type: ignore[attr-defined]
        self.parse_array = self._counted(decoder.JSONArray)  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_one_more(*args: Any) -> Any:
            self.num_containers += 1
            if self.num_containers > MAX_CONTAINERS:
                raise ValueError(f"more than {MAX_CONTAINERS} lists and objects")
            return parse(*args)

        return parse_one_more


def _in_steps(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object key by key: a million at once take 0.4 s, in which no other thread runs."""
    return {key: value for key, value in pairs}  # noqa: C416


def _integer(digits: str) -> int:
    """Return an integer; at a call of Python code, other threads can run."""
    return int(digits)


def parse_json(body: bytes) -> Any:
    """Return the value of a body.

    A body of more than MAX_PARTS commas and brackets is read by Python code, which is slow but lets other threads run:
    the C reader blocks them for 0.1 s for a megabyte of empty lists, and for 0.3 s for 8 MiB of long integers.

    Raises:
        ValueError: it is not JSON, or has more than MAX_CONTAINERS lists and objects, or more than MAX_LEVELS levels,
            which recursive code cannot take.
    """
    num_parts = sum(map(body.count, (b",", b"[", b"{")))
    try:
        if num_parts > MAX_PARTS:
            value = json.loads(body, cls=_PythonDecoder)
        else:
            value = json.loads(body, parse_int=_integer if len(body) > _MAX_INTEGERS_BYTES else None)
    except RecursionError as error:
        raise ValueError(f"more than {MAX_LEVELS} levels") from error
    level = [value]
    for _ in range(MAX_LEVELS):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_LEVELS} levels")


async def parse_body(body: bytes, read: Callable[[bytes], T]) -> T:
    """Return what `read` returns for a body, called in a thread if the body is large; see `off_loop`."""
    return await off_loop(len(body), read, body)


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON; a large one is made of one text after the other, so that other threads can run.

    Args:
        value: what `json.dumps` takes.
        options: of `json.dumps`.
    """
    if size_of(value) <= MAX_AT_ONCE:
        return json.dumps(value, **options)
    return "".join(json.JSONEncoder(**options).iterencode(value))
