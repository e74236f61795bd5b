"""Calls of a user's Gymnasium environment: make, reset, step and close, with errors that name the environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from agentenv._util.paths import place_of
from agentenv.core.types import as_flag
from agentenv.errors import AgentEnvError, ConfigError, ContractError, EpisodeFailed, MissingDependency

_SHOWN_CHARS = 80
_TEXT_CHARS = 500


@contextmanager
def named(where: str) -> Iterator[None]:
    """Convert exceptions of an environment into agentenv's errors that name it; agentenv's own errors pass.

    Raises:
        MissingDependency: the environment lacks a package; the message holds Gymnasium's hint.
        EpisodeFailed: any other exception.
    """
    try:
        yield
    except AgentEnvError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        hint = str(error).rstrip(".")
        raise MissingDependency(f"{where}: expected its packages, got none: {hint}. Install them.") from error
    except Exception as error:
        failed = EpisodeFailed(f"{where}: expected no exception, got {type(error).__name__}: {str(error).rstrip('.')}.")
        vars(failed)["place"] = place_of(error)
        raise failed from error


def check_id(env_id: str) -> None:
    """Check that an id is registered.

    Raises:
        ConfigError: the id is unknown; the message holds Gymnasium's suggestion.
        MissingDependency: the module in `module:Id` cannot be imported.
    """
    try:
        gymnasium.spec(env_id)
    except ModuleNotFoundError as error:
        raise MissingDependency(f"{env_id}: expected its module, got {error}. Install it.") from error
    except (gymnasium.error.Error, ValueError) as error:
        raise ConfigError(
            f"{env_id}: expected a registered Gymnasium environment, got none: {str(error).rstrip('.')}. "
            "Check the id, or write it as module:Id, which imports the module first."
        ) from error


def make(env: str | Callable[..., Any], kwargs: Mapping[str, Any], *, ansi: bool, max_steps: int | None) -> Any:
    """Make an environment, with text rendering if `ansi` is set and it supports that.

    Raises:
        ConfigError: the environment does not take the arguments.
        MissingDependency: it needs a package that is not installed.
        EpisodeFailed: it cannot be made.
    """
    where = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    with named(f"{where}: making it"):
        if not isinstance(env, str):
            instance = env(**kwargs)
            return gymnasium.wrappers.TimeLimit(instance, max_steps) if max_steps else instance
        arguments = dict(kwargs)
        if ansi and "render_mode" not in arguments:
            entry: Any = gymnasium.spec(env).entry_point
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            if "ansi" in (getattr(creator, "metadata", None) or {}).get("render_modes", ()):
                arguments["render_mode"] = "ansi"
        try:
            return gymnasium.make(env, max_episode_steps=max_steps, disable_env_checker=True, **arguments)
        except TypeError as error:
            raise ConfigError(f"{env}: expected its own arguments, got {arguments!r}: {error}.") from error


def registered_max_steps(env: str | Callable[..., Any]) -> int | None:
    """Return the step limit that an environment is registered with; None if it has none or is not registered yet."""
    spec = gymnasium.registry.get(env) if isinstance(env, str) else None
    return None if spec is None else spec.max_episode_steps


def reset_values(where: str, values: Any) -> tuple[Any, dict[str, Any]]:
    """Return the observation and the info of `reset`.

    Raises:
        ContractError: `reset` returned another form.
    """
    if not isinstance(values, tuple) or len(values) != 2 or not isinstance(values[1], Mapping):
        raise ContractError(
            f"{where}.reset: expected (observation, info), got {_shown(values)}. "
            "Wrap an environment of the older gym so that it has Gymnasium's form."
        )
    return values[0], dict(values[1])


def step_values(where: str, values: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Return the five values of `step`, the reward as a finite float.

    Raises:
        ContractError: `step` returned another form, the reward is not a finite number, or a flag is not a bool or one
            element of an array or tensor that is 0 or 1.
    """
    if not isinstance(values, tuple) or len(values) != 5 or not isinstance(values[4], Mapping):
        raise ContractError(
            f"{where}.step: expected (observation, reward, terminated, truncated, info), got {_shown(values)}. "
            "Wrap an environment of the older gym so that it has Gymnasium's form."
        )
    observation, reward, terminated, truncated, info = values
    number = number_of(reward)
    if not math.isfinite(number):
        raise ContractError(f"{where}.step: reward: expected a finite number, got {_shown(reward)}.")
    flags = as_flag(terminated, f"{where}.step: terminated"), as_flag(truncated, f"{where}.step: truncated")
    return observation, number, *flags, dict(info)


def facts(info: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the finite numbers and the texts (shortened) of an info; leave out arrays and other objects."""
    values: dict[str, float | str] = {}
    for key, value in info.items():
        if isinstance(value, str):
            values[str(key)] = value[:_TEXT_CHARS]
        elif math.isfinite(number := number_of(value)):
            values[str(key)] = number
    return values


def number_of(value: Any) -> float:
    """Return a number, or the one element of an array or tensor, as a float; NaN for anything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of several elements; the last is torch's
        return math.nan


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:_SHOWN_CHARS]
