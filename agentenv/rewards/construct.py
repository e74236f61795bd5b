"""Construct an object from options, as JSON has them, with errors that name what there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from agentenv._util.suggest import did_you_mean
from agentenv.errors import AgentEnvError, ConfigError


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
        fields = [*get_type_hints(*get_args(hint))] if get_origin(hint) is Unpack else []
        known, takes_any = [*known, *fields], not fields
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
            f"{name}: expected it to be constructed with {dict(options)!r:.200}, got {type(error).__name__}: {error}. "
            "Change the options, or fix the class."
        ) from error
