"""What a grade took besides time: attempts, requests, tokens. Who grades collects it, however deep below it is counted.

A scorer and a judge count for themselves, over all who ask them; here each count goes to the one who asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_SPENT: ContextVar[dict[str, float] | None] = ContextVar("spent", default=None)
RM_RETRIED = "rm/num_retried"
"""Attempts at a reward model that were not the first."""


@contextmanager
def collected() -> Iterator[dict[str, float]]:
    """What this task, and those that it begins in here, spend; by name, without what is 0."""
    into: dict[str, float] = {}
    outer = _SPENT.set(into)
    try:
        yield into
    finally:
        _SPENT.reset(outer)


def spend(counts: Mapping[str, float]) -> None:
    """Count for the one who collects, if anybody does."""
    into = _SPENT.get()
    if into is None:
        return
    for name, count in counts.items():
        if count:
            into[name] = into.get(name, 0.0) + count
