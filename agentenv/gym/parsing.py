"""Texts to actions of a Gymnasium space: the last action that an answer names, or what is wrong with it in words.

An illegal action stays one: nothing here falls back to a default.
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
from agentenv.rewards.text import final_text

_READ_CHARS = 20_000
"""Of the end of an answer: an action that is further from it is not the last thing said."""
_JSON_CHARS = 4_000
_NUMBER = r"[-+]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?"
_ONE = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w]|\.\d)")
_RUN = re.compile(rf"(?<![\w.]){_NUMBER}(?:[\s,;\[\]()]+{_NUMBER})*(?![\w]|\.\d)")
_ARRAYS = spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
_TAGS = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Illegal:
    """Why an answer is no legal action: a sentence for the policy."""

    reason: str


Names = Mapping[str, int]
"""Lower-case words to actions of a Discrete space; several may mean one, the first is the one that is said."""
Parse = Callable[[str, Any], Any]
"""`parse(answer, space)` gives an action of the space, or Illegal."""


def names_of(actions: Sequence[str] | Mapping[str, int] | None, space: Any) -> dict[str, int]:
    """The words for the actions of a Discrete space: a list says one for each, in order; a mapping may have several
    for one, and none for others.

    Raises:
        ConfigError: there are words for actions that are none, or a list has not one for each.
    """
    if not actions:
        return {}
    first = int(getattr(space, "start", 0))
    pairs = actions.items() if isinstance(actions, Mapping) else ((n, first + i) for i, n in enumerate(actions))
    names = {str(name).lower(): int(action) for name, action in pairs}
    discrete = isinstance(space, spaces.Discrete)
    wrong = [name for name, action in names.items() if not (discrete and space.contains(action))]
    if wrong:
        raise ConfigError(f"actions: expected names of actions of {space}, got {wrong}. Give one name per action.")
    if not isinstance(actions, Mapping) and len(names) != space.n:
        some = json.dumps(dict(list(names.items())[:2]))
        raise ConfigError(
            f"actions: expected {space.n} different names, one for each action of {space}, got {len(names)} "
            f"({', '.join(names)}). Name all, or give a mapping such as {some}."
        )
    return names


def read_action(answer: str, space: Any, *, names: Names = {}, form: str = "last") -> Any:  # noqa: B006 - never changed
    """The action that an answer names, as the space has it; or Illegal with what to say to the policy.

    What a model thought (`<think>…</think>`) is no answer. With `form` "last" the last action said counts; where
    actions have names, a number counts only where the answer is nothing else. With "tags" only what the last
    <action>…</action> holds counts, and it must be an action and nothing else. Text spaces take the answer whole,
    character by character.

    Raises:
        ConfigError: actions of this space cannot be read from text.
    """
    said = answer if form == "last" and is_text(space) else final_text(answer)
    if said is None:
        return Illegal("No action was found: the thought did not end.")
    if form == "tags":
        said = _in_tags(said)
        if said is None:
            return Illegal("No action was found between <action> and </action>.")
    if is_text(space):
        legal = space.contains(said)
        return said if legal else Illegal("That text is too long or has characters that are not allowed.")
    said = said[-_READ_CHARS:]
    if isinstance(space, spaces.Discrete):
        return _discrete(said, space, names, whole=form == "tags")
    if isinstance(space, _ARRAYS):
        return _numbers(said, space)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _structure(said, space)
    raise unreadable(space)


def unreadable(space: Any) -> ConfigError:
    """The error of a space whose actions nobody can say."""
    return ConfigError(f"from_gymnasium: expected actions that can be read from text, got {space}. Give `parse`.")


def is_text(space: Any) -> bool:
    """Gymnasium's Text, and spaces of ours and others whose members are texts."""
    return isinstance(space, spaces.Text | AnyText)


def can_be_read(space: Any) -> bool:
    """Whether `read_action` knows how an action of a space is said."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return all(can_be_read(one) for one in inner)
    return is_text(space) or isinstance(space, spaces.Discrete | _ARRAYS)


def describe_actions(space: Any, *, names: Names = {}, form: str = "last") -> str:  # noqa: B006 - never changed
    """What a policy may say, in a sentence or two."""
    end = " Put it between <action> and </action>." if form == "tags" else ""
    if isinstance(space, spaces.Discrete):
        words = list(dict.fromkeys(first_name(action, names) for action in names.values()))
        said = f"Actions: {', '.join(words)}. Say one of them; the last one you say counts."
        first, last = int(space.start), int(space.start + space.n - 1)
        return (said if words else f"Say one whole number from {first} to {last}; the last one counts.") + end
    if isinstance(space, _ARRAYS):
        example = ", ".join(["0"] * _size(space))
        return f"Say {_expected(space)}, such as [{example}]; the last list you say counts.{end}"
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return f"Say a JSON value of the form {_form(space)}; the last one you say counts.{end}"
    return end.strip()


def first_name(action: int, names: Names) -> str:
    """The word for an action, or its number."""
    return next((name for name, meant in names.items() if meant == action), str(action))


def _in_tags(text: str) -> str | None:
    found = _TAGS.findall(text)
    return found[-1].strip() if found else None


def _discrete(said: str, space: spaces.Discrete[Any], names: Names, *, whole: bool) -> Any:
    lowered = said.lower()
    if names:
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)")
        found = [lowered] if whole and lowered in names else [] if whole else pattern.findall(lowered)
        if found:
            return names[found[-1]]
    numbers = _ONE.findall(said)
    if not numbers or ((whole or names) and numbers[-1] != said.rstrip(".")):
        return Illegal(f"No action was found in {_quoted(said)}.")
    number = float(numbers[-1])
    action = int(number) if number.is_integer() else None
    if action is None or not space.contains(action):
        return Illegal(f"{numbers[-1]} is no action.")
    return action


def _numbers(said: str, space: Any) -> Any:
    runs = _RUN.findall(said)
    if not runs:
        return Illegal(f"No numbers were found in {_quoted(said)}.")
    numbers = [float(text) for text in _ONE.findall(runs[-1])]
    if len(numbers) != _size(space):
        return Illegal(f"Expected {_expected(space)}, got {len(numbers)} numbers.")
    return _array(numbers, space)


def _array(numbers: Any, space: Any) -> Any:
    """The numbers in the shape and type of a space; Illegal where they are none of it."""
    given = np.asarray(numbers, dtype=np.float64)
    whole = np.issubdtype(space.dtype, np.integer)
    if given.size != _size(space) or not np.isfinite(given).all() or (whole and (given != np.floor(given)).any()):
        return Illegal(f"Expected {_expected(space)}, got {_short(numbers)}.")
    limits = np.iinfo(space.dtype) if whole else np.finfo(space.dtype)
    if (given < float(limits.min)).any() or (given > float(limits.max)).any():
        return Illegal(f"Expected {_expected(space)}, got {_short(numbers)}.")
    action = given.reshape(space.shape).astype(space.dtype)
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


def _structure(said: str, space: Any) -> Any:
    value = _last_json(said[-_JSON_CHARS:], dict if isinstance(space, spaces.Dict) else list)
    if value is None:
        return Illegal(f"No JSON value of the form {_form(space)} was found.")
    return _of_json(value, space, "the action")


def _last_json(text: str, kind: type) -> Any:
    """The last JSON object or array in a text that is in no other."""
    decoder, at, last, opening = json.JSONDecoder(), 0, None, "{" if kind is dict else "["
    while (at := text.find(opening, at)) >= 0:
        try:
            last, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
    return last


def _of_json(value: Any, space: Any, where: str) -> Any:
    """A JSON value as a member of a space; Illegal with where it is not."""
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
        made = Illegal("") if flat is None else _array(flat, space)
        return Illegal(f"Expected {_expected(space)} for {where}.") if isinstance(made, Illegal) else made
    if is_text(space):
        return value if isinstance(value, str) and space.contains(value) else Illegal(f"Expected a text for {where}.")
    if isinstance(space, spaces.Discrete):
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        last = int(space.start + space.n - 1)
        told = Illegal(f"Expected a whole number from {int(space.start)} to {last} for {where}.")
        return value if whole and space.contains(value) else told
    raise unreadable(space)


def _all(read: dict[Any, Any], kind: type) -> Any:
    """What was read of each part together; the first Illegal where there is one."""
    wrong = next((part for part in read.values() if isinstance(part, Illegal)), None)
    return wrong or (read if kind is dict else tuple(read.values()))


def _flat(value: Any) -> list[float] | None:
    """The numbers of a JSON number or (nested) list; None where there is anything else."""
    if isinstance(value, list):
        parts = [_flat(one) for one in value]
        return None if None in parts else [number for part in parts for number in part or ()]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return [float(value)] if is_number else None


def _form(space: Any) -> str:
    """A JSON value of a space, with words in the places of values."""
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
