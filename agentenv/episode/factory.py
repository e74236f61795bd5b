"""Prepare an agent class for its instances: complete a foreign class, check the constructor's arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from math import inf
from typing import Any

from agentenv.core.agent import AgentInstance
from agentenv.errors import ConfigError


def as_agent(cls: Any) -> type[AgentInstance]:
    """Return a foreign agent class with our defaults for the methods it lacks, and a subclass of ours as it is.

    Raises:
        ConfigError: its `score_range` is neither None nor an interval.
    """
    agent = cls if issubclass(cls, AgentInstance) else _completed(cls)
    match agent.score_range:
        case None:
            return agent
        case (int() | float() as low, int() | float() as high) if -inf < low < high < inf:
            return agent
    raise ConfigError(
        f"{cls.__name__}.score_range: expected (low, high) with low < high, both finite, or None, "
        f"got {agent.score_range!r}. Change the attribute."
    )


@functools.cache
def _completed(cls: Any) -> type[AgentInstance]:
    return type(cls.__name__, (cls, AgentInstance), {"score_range": getattr(cls, "score_range", None)})


def check_arguments(cls: type[Any], kwargs: Mapping[str, Any], where: str = "--env_kwargs") -> None:
    """Raise if the constructor of `cls` does not take these arguments, before the first episode.

    `where` names their source: a flag, or an argument in Python.

    Raises:
        ConfigError: with the arguments that it takes.
    """
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        names = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
        raise ConfigError(
            f"{where}: expected arguments of {cls.__name__} {names}, got {dict(kwargs)!r}: {error}. "
            f"{'Change the JSON.' if where.startswith('--') else 'Change them.'}"
        ) from error
