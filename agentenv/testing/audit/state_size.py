"""Measures how much the attributes of an environment hold, without calling their code."""

from __future__ import annotations

from collections import deque
from typing import Any

_PER_ITEM = 8
_MAX_ITEMS = 50_000
"""Maximum number of values to visit, so that a large state delays no step."""


def state_size(instance: Any) -> int:
    """Return the approximate bytes in the attributes of an object and of what they refer to, each counted once."""
    size, seen, left = 0, set[int](), [instance]
    while left and len(seen) < _MAX_ITEMS:
        value = left.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, str | bytes | bytearray):
            size += len(value)
        elif isinstance(value, dict):
            size += 2 * _PER_ITEM * len(value)
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            size += _PER_ITEM * len(value)
            left += value
        else:
            size += int(getattr(value, "nbytes", 0)) if type(value).__module__ == "numpy" else _PER_ITEM
            left.append(getattr(value, "__dict__", None))
    return size
