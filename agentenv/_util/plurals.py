"""Numbers of things in text that a person reads."""

from __future__ import annotations

from collections.abc import Mapping


def counted(num: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun, as "1 turn" or "3 turns"; `plural` is the noun's plural if it has no plain "s"."""
    return f"{num} {noun}" if num == 1 else f"{num} {plural or f'{noun}s'}"


def histogram(counts: Mapping[str, int]) -> str:
    """Return names with their counts on one line; "none" without any."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
