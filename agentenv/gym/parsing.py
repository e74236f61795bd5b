"""Parse text into actions of a Gymnasium space: the last action in an answer, or the reason why it has none.

An illegal action stays illegal: nothing here falls back to a default.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from agentenv.errors import ConfigError
from agentenv.gym.spaces import AnyText
from agentenv.rewards.rules.text import final_text

_READ_CHARS = 20_000
"""Characters at the end of an answer in which an action counts as the last one."""
_NUMBER = r"[-+]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?"
_ONE = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w]|\.\d)")
_RUN = re.compile(rf"(?<![\w.]){_NUMBER}(?:[\s,;\[\]()]+{_NUMBER})*(?![\w]|\.\d)")
_ARRAYS = spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
_TAGS = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Illegal:
    """The reason why an answer has no legal action, as a sentence for the policy."""

    reason: str


Names = Mapping[str, int]
"""Lower-case words to actions of a Discrete space; of several words for one action, messages use the first."""
Parse = Callable[[str, Any], Any]
"""`parse(answer, space)` returns an action of the space, or Illegal."""


def names_of(actions: Sequence[str] | Mapping[str, int] | None, space: Any) -> dict[str, int]:
    """Return the words for the actions of a Discrete space.

    A list has one word per action, in order. A mapping may have several words for one action and none for another.

    Raises:
        ConfigError: a word names an action outside the space, or a list does not have one word per action.
    """
    if not actions:
        return {}
    first = int(getattr(space, "start", 0))
    pairs = actions.items() if isinstance(actions, Mapping) else ((n, first + i) for i, n in enumerate(actions))
    names = {str(name).lower(): int(action) for name, action in pairs}
    discrete = isinstance(space, spaces.Discrete)
    wrong = [name for name, action in names.items() if not (discrete and space.contains(action))]
    if wrong:
        raise ConfigError(f"actions: expected names of actions of {space}, got {wrong}. Pass one name per action.")
    if not isinstance(actions, Mapping) and len(names) != space.n:
        some = json.dumps(dict(list(names.items())[:2]))
        raise ConfigError(
            f"actions: expected {space.n} different names, one for each action of {space}, got {len(names)} "
            f"({', '.join(names)}). Name all, or pass a mapping such as {some}."
        )
    return names


def read_action(answer: str, space: Any, *, names: Names = {}, form: str = "last") -> Any:  # noqa: B006 - never changed
    """Return the action in an answer as an element of the space, or Illegal with a reason for the policy.

    Reasoning (`<think>…</think>`) is not part of the answer. With `form` "last" the last action in the answer counts;
    if actions have names, a number counts only if the answer is nothing else. With "tags" only the content of the last
    <action>…</action> counts, and it must be exactly an action. Text spaces take the whole answer, character by
    character.

    Raises:
        ConfigError: actions of this space cannot be read from text.
    """
    text = answer if form == "last" and is_text(space) else final_text(answer)
    if text is None:
        return Illegal("No action was found: the thought did not end.")
    if form == "tags":
        contents = _TAGS.findall(text)
        if not contents:
            return Illegal("No action was found between <action> and </action>.")
        text = contents[-1].strip()
    if is_text(space):
        legal = space.contains(text)
        return text if legal else Illegal("That text is too long or has characters that are not allowed.")
    text = text[-_READ_CHARS:]
    if isinstance(space, spaces.Discrete):
        return _discrete(text, space, names, whole=form == "tags")
    if isinstance(space, _ARRAYS):
        return _numbers(text, space)
    raise unreadable(space)


def unreadable(space: Any) -> ConfigError:
    """Return the error for a space whose actions cannot be read from text."""
    return ConfigError(f"from_gymnasium: expected actions that can be read from text, got {space}. Pass `parse`.")


def is_text(space: Any) -> bool:
    """Return True for Gymnasium's Text and for AnyText."""
    return isinstance(space, spaces.Text | AnyText)


def can_be_read(space: Any) -> bool:
    """Return True if `read_action` can read actions of the space."""
    return is_text(space) or isinstance(space, spaces.Discrete | _ARRAYS)


def describe_actions(space: Any, *, names: Names = {}, form: str = "last") -> str:  # noqa: B006 - never changed
    """Describe the legal answers for the policy, in a sentence or two."""
    end = " Put it between <action> and </action>." if form == "tags" else ""
    if isinstance(space, spaces.Discrete):
        words = list(dict.fromkeys(first_name(action, names) for action in names.values()))
        by_name = f"Actions: {', '.join(words)}. Say one of them; the last one you say counts."
        first, last = int(space.start), int(space.start + space.n - 1)
        return (by_name if words else f"Say one whole number from {first} to {last}; the last one counts.") + end
    if isinstance(space, _ARRAYS):
        example = ", ".join(["0"] * _size(space))
        return f"Say {_expected(space)}, such as [{example}]; the last list you say counts.{end}"
    return end.strip()


def first_name(action: int, names: Names) -> str:
    """Return the first word for an action, or its number as text."""
    return next((name for name, meant in names.items() if meant == action), str(action))


def _discrete(text: str, space: spaces.Discrete[Any], names: Names, *, whole: bool) -> Any:
    lowered = text.lower()
    if names:
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)")
        matches = [lowered] if whole and lowered in names else [] if whole else pattern.findall(lowered)
        if matches:
            return names[matches[-1]]
    numbers = _ONE.findall(text)
    if not numbers or ((whole or names) and numbers[-1] != text.rstrip(".")):
        return Illegal(f"No action was found in {_quoted(text)}.")
    number = float(numbers[-1])
    action = int(number) if number.is_integer() else None
    if action is None or not space.contains(action):
        return Illegal(f"{numbers[-1]} is not an action.")
    return action


def _numbers(text: str, space: Any) -> Any:
    runs = _RUN.findall(text)
    if not runs:
        return Illegal(f"No numbers were found in {_quoted(text)}.")
    numbers = [float(text) for text in _ONE.findall(runs[-1])]
    if len(numbers) != _size(space):
        return Illegal(f"Expected {_expected(space)}, got {len(numbers)} numbers.")
    values = np.asarray(numbers).reshape(space.shape)
    whole = np.issubdtype(space.dtype, np.integer)
    limits = np.iinfo(space.dtype) if whole else np.finfo(space.dtype)
    is_held = ((values >= limits.min) & (values <= limits.max)).all() and not (whole and (values % 1).any())
    if is_held and space.contains(action := values.astype(space.dtype)):
        return action
    some = ", ".join(f"{each:g}" for each in numbers[:8])
    return Illegal(f"Expected {_expected(space)}, got {some}.")


def _size(space: Any) -> int:
    return math.prod(space.shape) if space.shape else 1


def _expected(space: Any) -> str:
    size = _size(space)
    count = "1 number" if size == 1 else f"{size} numbers"
    if isinstance(space, spaces.MultiBinary):
        return f"{count}, each 0 or 1"
    if isinstance(space, spaces.MultiDiscrete):
        first, last = space.start.ravel(), (space.start + space.nvec - 1).ravel()
        return f"{count}, " + ", ".join(f"{low} to {high}" for low, high in zip(first, last, strict=True))
    low, high = space.low.ravel(), space.high.ravel()
    if (low == low[0]).all() and (high == high[0]).all():
        low, high = low[:1], high[:1]
    bounds = ", ".join(_between(float(first), float(last)) for first, last in zip(low[:16], high[:16], strict=True))
    kind = " (whole)" if np.issubdtype(space.dtype, np.integer) else ""
    return f"{count}{kind}, {'each ' if size > 1 and len(low) == 1 else ''}{bounds}"


def _between(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "of any size"
    return f"{low:g} or more" if math.isinf(high) else f"up to {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def _quoted(text: str) -> str:
    short = " ".join(text.split())
    return f'"{short[:40]}…"' if len(short) > 40 else f'"{short}"'
