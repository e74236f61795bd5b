"""Calls of environments that others wrote: made, reset, stepped and closed, with errors that say whose they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from agentenv.episode import place_of
from agentenv.errors import AgentEnvError, ConfigError, ContractError, EpisodeFailed, MissingDependency

_SHOWN_CHARS = 80
_TEXT_CHARS = 500


@contextmanager
def named(where: str) -> Iterator[None]:
    """What a foreign environment raises as an error of ours that names it; agentenv's own pass.

    Raises:
        MissingDependency: it lacks a package; with Gymnasium's own hint.
        EpisodeFailed: anything else.
    """
    try:
        yield
    except AgentEnvError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        hint = str(error).rstrip(".")
        raise MissingDependency(f"{where}: expected its packages, got none: {hint}. Install them.") from error
    except Exception as error:
        failed = EpisodeFailed(
            f"{where}: expected no exception, got {type(error).__name__}: {str(error).rstrip('.')}. Mend it."
        )
        vars(failed)["place"] = place_of(error)
        raise failed from error


def check_id(env_id: str) -> None:
    """Refuse an id that nobody registered, with Gymnasium's own words for what is near.

    Raises:
        ConfigError: there is no such environment.
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
    """An environment, drawn as text where it can be and `ansi` asks for it.

    Raises:
        ConfigError: the arguments are none of its.
        MissingDependency: it needs a package that is not installed.
        EpisodeFailed: it cannot be made.
    """
    where = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    with named(f"{where}: making it"):
        if not isinstance(env, str):
            made = env(**kwargs)
            return gymnasium.wrappers.TimeLimit(made, max_steps) if max_steps else made
        given = dict(kwargs)
        if ansi and "render_mode" not in given and "ansi" in _render_modes(env):
            given["render_mode"] = "ansi"
        try:
            return gymnasium.make(env, max_episode_steps=max_steps, disable_env_checker=True, **given)
        except TypeError as error:
            raise ConfigError(f"{env}: expected its own arguments, got {given!r}: {error}. Change them.") from error


def _render_modes(env_id: str) -> Any:
    spec = gymnasium.spec(env_id)
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return (getattr(creator, "metadata", None) or {}).get("render_modes", ())


def reset_values(where: str, values: Any) -> tuple[Any, dict[str, Any]]:
    """What `reset` gave: an observation and an info.

    Raises:
        ContractError: it is another form.
    """
    if not isinstance(values, tuple) or len(values) != 2 or not isinstance(values[1], Mapping):
        raise ContractError(
            f"{where}.reset: expected (observation, info), got {_shown(values)}. "
            "Gymnasium's form is asked for: wrap an environment of the older gym."
        )
    return values[0], dict(values[1])


def step_values(where: str, values: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """What `step` gave: five values, the reward a finite float.

    Raises:
        ContractError: it is another form, or the reward is no finite number.
    """
    if not isinstance(values, tuple) or len(values) != 5 or not isinstance(values[4], Mapping):
        raise ContractError(
            f"{where}.step: expected (observation, reward, terminated, truncated, info), got {_shown(values)}. "
            "Gymnasium's form is asked for: wrap an environment of the older gym."
        )
    observation, reward, terminated, truncated, info = values
    number = number_of(reward)
    if not math.isfinite(number):
        raise ContractError(f"{where}.step: reward: expected a finite number, got {_shown(reward)}. Mend it.")
    return observation, number, bool(terminated), bool(truncated), dict(info)


def facts(info: Mapping[str, Any]) -> dict[str, float | str]:
    """The numbers and short texts of an info; arrays, objects and what is not finite are left out."""
    found: dict[str, float | str] = {}
    for key, value in info.items():
        if isinstance(value, str):
            found[str(key)] = value[:_TEXT_CHARS]
        elif math.isfinite(number := number_of(value)):
            found[str(key)] = number
    return found


def number_of(value: Any) -> float:
    """A number, or an array or a tensor of one, as a float; NaN for anything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of several elements; the last is torch's
        return math.nan


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:_SHOWN_CHARS]
