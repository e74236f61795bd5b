"""What the constructors of rewards check, and how labels and values are shown in errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agentenv.errors import ConfigError, DataError
from agentenv.types import MAX_REWARD

MAX_SHOWN_CHARS = 1000
MAX_WHOLE = 1 << 53
"""Whole numbers up to here are exact as floats."""


def number(where: str, value: object, *, low: float = -MAX_REWARD, high: float = MAX_REWARD) -> float:
    """The value as a float.

    Raises:
        ConfigError: it is no number of `low` to `high`; bool and NaN are none.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise ConfigError(f"{where}: expected a number in {low:g}..{high:g}, got {value!r}. Correct the argument.")


def whole_number(where: str, value: object, *, low: int = 0, high: int = MAX_WHOLE) -> int:
    """The value as an int.

    Raises:
        ConfigError: it is no int of `low` to `high`; bool is none.
    """
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise ConfigError(f"{where}: expected a whole number in {low}..{high}, got {value!r}. Correct the argument.")


def one_of(where: str, value: Any, choices: Collection[str]) -> str:
    """The value, which is one of `choices`.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigError(f"{where}: expected one of {', '.join(choices)}, got {value!r}. Correct the argument.")


def is_reward(where: str, value: object, method: str) -> None:
    """Refuse what is no reward: `method` is `grade`, or `grade_group` for one of groups.

    Raises:
        ConfigError: it has no such method and bounds, or is the class of a reward.
    """
    bounds = None if isinstance(value, type) else getattr(value, "bounds", None)
    if not isinstance(bounds, tuple | list) or len(bounds) != 2 or not callable(getattr(value, method, None)):
        raise ConfigError(
            f"{where}: expected a reward, with bounds (low, high) and `async def {method}`, got {value!r:.200}. "
            "Make one."
        )


def label_error(expected: str, label: object, *, where: str = "label") -> DataError:
    """The error of a row that this reward cannot use."""
    return DataError(f"{where}: expected {expected}, got {shown(repr(label), 200)}. Correct the row.")


def shown(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The text, cut where it is too long to be kept beside a reward."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
