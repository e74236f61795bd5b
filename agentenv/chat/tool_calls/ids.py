"""Ids of tool calls that have none."""

from __future__ import annotations

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def call_id(turn_index: int, index: int) -> str:
    """Return nine letters and digits (Mistral's templates accept nothing else) for the call at `index` of a turn."""
    return f"c{_base36(turn_index)}{_base36(index)}"


def _base36(number: int) -> str:
    digits = ""
    for _ in range(4):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
