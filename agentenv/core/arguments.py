"""Checks of arguments, construction from options, and short forms of labels and values for error messages."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar, Unpack, get_args, get_origin, get_type_hints

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.core.types import MAX_REWARD
from agentenv.errors import AgentEnvError, ConfigError, DataError

_T = TypeVar("_T")
MAX_SHOWN_CHARS = 1000
MAX_WHOLE = 1 << 53
"""Whole numbers up to here are exact as floats."""


def number(where: str, value: object, *, low: float = -MAX_REWARD, high: float = MAX_REWARD) -> float:
    """Return the value as a float.

    Raises:
        ConfigError: it is not a number between `low` and `high`; neither bool nor NaN counts.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise ConfigError(f"{where}: expected a number in {low:g}..{high:g}, got {value!r}.")


def is_finite(value: object) -> bool:
    """Return True if the value is a number that a float32 can hold; bool counts."""
    return isinstance(value, int | float) and abs(value) <= MAX_REWARD


def whole_number(where: str, value: object, *, low: int = 0, high: int = MAX_WHOLE) -> int:
    """Return the value as an int.

    Raises:
        ConfigError: it is not an int between `low` and `high`; bool does not count.
    """
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise ConfigError(f"{where}: expected a whole number in {low}..{high}, got {value!r}.")


def one_of(where: str, value: Any, choices: Collection[str]) -> str:
    """Return the value if it is one of `choices`.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigError(f"{where}: expected one of {', '.join(choices)}, got {value!r}.")


def is_reward(where: str, value: object, method: str) -> None:
    """Raise if the value is not a reward: `method` is `grade`, or `grade_group` for a reward of groups.

    Raises:
        ConfigError: it has no such method and bounds, or is the class of a reward.
    """
    bounds = None if isinstance(value, type) else getattr(value, "bounds", None)
    if not isinstance(bounds, tuple | list) or len(bounds) != 2 or not callable(getattr(value, method, None)):
        raise ConfigError(
            f"{where}: expected a reward, with bounds (low, high) and `async def {method}`, got {value!r:.200}."
        )


def label_error(expected: str, label: object, *, where: str = "label") -> DataError:
    """Return the error for a row that this reward cannot use."""
    return DataError(f"{where}: expected {expected}, got {brief(label)}. Correct the row.")


def shown(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return the text, cut if it is too long to be recorded with a reward."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object in the text of a flag.

    Raises:
        ConfigError: it is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag}: expected a JSON object, got {text!r} ({error}). Write e.g. {flag} '{{\"max_attempts\": 3}}'"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: expected a JSON object, got {text!r}. Write e.g. {flag} '{{\"max_attempts\": 3}}'")
    return value


def construct(name: str, cls: Callable[..., Any], options: Mapping[str, Any], *args: Any) -> Any:
    """Return an object constructed with these options, and `args` before them.

    Raises:
        ConfigError: the constructor takes other options, which the message lists, or it failed.
    """
    try:
        parameters = list(inspect.signature(cls).parameters.values())[len(args) :]
    except ValueError as error:
        raise ConfigError(f"{name}: expected a class of Python, got {cls!r}: {error}. Name another.") from error
    known = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    rest = [each.name for each in parameters if each.kind is each.VAR_KEYWORD]
    takes_any = False
    if rest:  # `**name: Unpack[…]` lists its fields; any other `**name` takes every option
        hint = get_type_hints(cls.__init__).get(rest[0]) if inspect.isclass(cls) else None
        listed = [*get_type_hints(*get_args(hint))] if get_origin(hint) is Unpack else []
        known, takes_any = [*known, *listed], not listed
    unknown = [each for each in options if each not in known]
    expected = f"{name}: expected options among {', '.join(known) or 'none'}, got"
    if unknown and not takes_any:
        raise ConfigError(f"{expected} {unknown[0]!r}.{did_you_mean(unknown[0], known, 'Check its name.')}")
    try:
        inspect.signature(cls).bind(*args, **options)
    except TypeError as error:
        raise ConfigError(f"{expected} {dict(options)!r:.200} ({error}). Pass what is missing.") from error
    try:
        return cls(*args, **options)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}: expected it to be constructed with {dict(options)!r:.200}, got {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Change the options, or fix the class."
        ) from error


def settings_from(where: str, given: Any, default: _T) -> _T:
    """Return an object of the default's class: `given` itself, or the default with the fields of a mapping replaced.

    Raises:
        ConfigError: `given` is something else, or names an unknown field.
    """
    if given is None:
        return default
    if isinstance(given, type(default)):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: expected {type(default).__name__}(…), or an object with some of its fields, got {given!r:.200}."
        )
    usual = {each.name: getattr(default, each.name) for each in fields(default)}  # type: ignore[arg-type]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return construct(where, type(default), {**usual, **values})  # type: ignore[no-any-return]
