"""Numbers of things in text that a person reads."""

from __future__ import annotations

import math
from collections.abc import Mapping


def counted(num: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun, as "1 turn" or "3 turns"; `plural` is the noun's plural if it has no plain "s"."""
    return f"{num} {noun}" if num == 1 else f"{num} {plural or f'{noun}s'}"


def histogram(counts: Mapping[str, int]) -> str:
    """Return names with their counts on one line; "none" without any."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def decimal(value: float, num: int = 3, sign: str = "") -> str:
    """Return a number with `num` decimals, or with more, up to 9, that show two digits of a small one."""
    if 1e-9 <= abs(value) < 1.0:
        num = max(num, min(9, 1 - math.floor(math.log10(abs(value)))))
    return f"{value:{sign}.{num}f}"
