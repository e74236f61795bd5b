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
_JSON_CHARS = 4_000
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
    if isinstance(space, spaces.Dict | spaces.Tuple):
        value = _last_json(text[-_JSON_CHARS:], dict if isinstance(space, spaces.Dict) else list)
        if value is None:
            return Illegal(f"No JSON value of the form {_form(space)} was found.")
        return _of_json(value, space, "the action")
    raise unreadable(space)


def unreadable(space: Any) -> ConfigError:
    """Return the error for a space whose actions cannot be read from text."""
    return ConfigError(f"from_gymnasium: expected actions that can be read from text, got {space}. Pass `parse`.")


def is_text(space: Any) -> bool:
    """Return True for Gymnasium's Text and for AnyText."""
    return isinstance(space, spaces.Text | AnyText)


def can_be_read(space: Any) -> bool:
    """Return True if `read_action` can read actions of the space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return all(can_be_read(one) for one in inner)
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
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return f"Say a JSON value of the form {_form(space)}; the last one you say counts.{end}"
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
    return _array(numbers, space)


def _array(numbers: Any, space: Any) -> Any:
    """Return the numbers in the shape and type of a space; Illegal if they are not an element."""
    values = np.asarray(numbers, dtype=np.float64)
    whole = np.issubdtype(space.dtype, np.integer)
    if values.size != _size(space) or not np.isfinite(values).all() or (whole and (values != np.floor(values)).any()):
        return Illegal(f"Expected {_expected(space)}, got {_short(numbers)}.")
    limits = np.iinfo(space.dtype) if whole else np.finfo(space.dtype)
    if (values < float(limits.min)).any() or (values > float(limits.max)).any():
        return Illegal(f"Expected {_expected(space)}, got {_short(numbers)}.")
    action = values.reshape(space.shape).astype(space.dtype)
    return action if space.contains(action) else Illegal(f"Expected {_expected(space)}, got {_short(numbers)}.")


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


def _last_json(text: str, kind: type) -> Any:
    """Return the last outermost JSON object or array in a text."""
    decoder, at, last, opening = json.JSONDecoder(), 0, None, "{" if kind is dict else "["
    while (at := text.find(opening, at)) >= 0:
        try:
            last, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
    return last


def _of_json(value: Any, space: Any, where: str) -> Any:
    """Return a JSON value as an element of a space; Illegal with the place that does not fit."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or set(value) != set(space.spaces):
            return Illegal(f"Expected an object with the keys {', '.join(map(str, space.spaces))} for {where}.")
        return _all({key: _of_json(value[key], inner, str(key)) for key, inner in space.spaces.items()}, dict)
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list) or len(value) != len(space.spaces):
            return Illegal(f"Expected a list of {len(space.spaces)} values for {where}.")
        pairs = enumerate(zip(value, space.spaces, strict=True))
        return _all({i: _of_json(one, inner, f"value {i + 1}") for i, (one, inner) in pairs}, tuple)
    if isinstance(space, _ARRAYS):
        flat = _flat(value)
        array = Illegal("") if flat is None else _array(flat, space)
        return Illegal(f"Expected {_expected(space)} for {where}.") if isinstance(array, Illegal) else array
    if is_text(space):
        return value if isinstance(value, str) and space.contains(value) else Illegal(f"Expected a text for {where}.")
    if isinstance(space, spaces.Discrete):
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        last = int(space.start + space.n - 1)
        illegal = Illegal(f"Expected a whole number from {int(space.start)} to {last} for {where}.")
        return value if whole and space.contains(value) else illegal
    raise unreadable(space)


def _all(read: dict[Any, Any], kind: type) -> Any:
    """Return the parts as one value, or the first Illegal among them."""
    wrong = next((part for part in read.values() if isinstance(part, Illegal)), None)
    return wrong or (read if kind is dict else tuple(read.values()))


def _flat(value: Any) -> list[float] | None:
    """Return the numbers of a JSON number or (nested) list; None if it holds anything else."""
    if isinstance(value, list):
        parts = [_flat(one) for one in value]
        return None if None in parts else [number for part in parts for number in part or ()]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return [float(value)] if is_number else None


def _form(space: Any) -> str:
    """Return the JSON form of a space's elements, with words instead of values."""
    if isinstance(space, spaces.Dict):
        return "{" + ", ".join(f'"{key}": {_form(inner)}' for key, inner in space.spaces.items()) + "}"
    if isinstance(space, spaces.Tuple):
        return "[" + ", ".join(_form(inner) for inner in space.spaces) + "]"
    if isinstance(space, spaces.Discrete):
        return f"({int(space.start)} to {int(space.start + space.n - 1)})"
    if is_text(space):
        return "(text)"
    return f"[({_expected(space)})]" if isinstance(space, _ARRAYS) else "?"


def _quoted(text: str) -> str:
    short = " ".join(text.split())
    return f'"{short[:40]}…"' if len(short) > 40 else f'"{short}"'


def _short(numbers: Any) -> str:
    text = ", ".join(f"{number:g}" for number in list(numbers)[:8])
    return text + (", …" if len(numbers) > 8 else "")
