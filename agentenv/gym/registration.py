"""Ids of environments for `gymnasium.make`, and `make` and `make_vec` for environments without one.

The id of an installed environment `some_name` is `agentenv/SomeName-v0`. Registration reads the metadata of installed
packages and imports no environment: a broken one fails only when it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.core.types import Limits
from agentenv.episode.endpoint.agent import owns_its_loop
from agentenv.episode.registry import installed_envs, load_env
from agentenv.errors import ConfigError

NAMESPACE = "agentenv"
ENTRY_POINT = "agentenv.gym.env:AgentEnv"
VECTOR_ENTRY_POINT = "agentenv.gym.vector:AgentVectorEnv"
_KINDS: dict[str, type[SyncVectorEnv | AsyncVectorEnv]] = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
_UNFIT = re.compile(r"[^\w.-]+")


def id_of(env: str) -> str:
    """Return the id of an environment: `math_retry` and a class `MathRetry` both become `agentenv/MathRetry-v0`."""
    path, _, attribute = env.partition(":")
    name = attribute or (PurePath(path).stem if path.endswith(".py") else path)
    camel = "".join(part[:1].upper() + part[1:] for part in re.split(r"[_\s-]+", name))
    return f"{NAMESPACE}/{_UNFIT.sub('', camel) or 'Env'}-v0"


def installed_ids() -> dict[str, str]:
    """Return the names of installed environments by id; of two names with the same id, the first."""
    names: dict[str, str] = {}
    for name in installed_envs():
        names.setdefault(id_of(name), name)
    return names


def env_ids() -> list[str]:
    """Return the ids that can be made: importable installed environments that have `step`."""
    return [env_id for env_id, name in installed_ids().items() if _can_step(name)]


class RegisteredSpec(EnvSpec):
    """The spec of an installed environment; `max_episode_steps` imports the environment at its first use."""

    _max_episode_steps: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._env = self.kwargs["env"]  # Gymnasium's make_vec empties kwargs before it asks for the steps

    @property
    def max_episode_steps(self) -> int | None:
        """The number of actions after which TimeLimit truncates; by default `max_turns_of` the environment."""
        if self._max_episode_steps is None and _can_step(self._env):
            self._max_episode_steps = max_turns_of(self._env)
        return self._max_episode_steps

    @max_episode_steps.setter
    def max_episode_steps(self, value: int | None) -> None:
        self._max_episode_steps = value


def max_turns_of(env: str) -> int:
    """Return the number of actions in an episode of an environment: its class's `max_turns`, else `Limits.max_turns`.

    Raises:
        ConfigError: the environment is unknown.
    """
    return getattr(load_env(env), "max_turns", None) or Limits().max_turns


def register_all() -> list[str]:
    """Register every installed environment with Gymnasium and return the ids; importing `agentenv.gym` calls it.

    Ids that are already registered stay unchanged. Gymnasium's TimeLimit truncates episodes after `max_turns_of` the
    environment unless `max_episode_steps` overrides it. TimeLimit does not notify the environment, so `on_truncate` is
    not called; `make` and AgentVectorEnv do call it.
    """
    ids = installed_ids()
    for env_id, name in ids.items():
        spec = RegisteredSpec(env_id, ENTRY_POINT, vector_entry_point=VECTOR_ENTRY_POINT, kwargs={"env": name})
        gymnasium.registry.setdefault(env_id, spec)
    return list(ids)


def spec_of(env: str, kwargs: Mapping[str, Any]) -> EnvSpec:
    """Return the spec of an environment; its JSON recreates the environment wherever agentenv is installed."""
    return EnvSpec(id_of(env), ENTRY_POINT, vector_entry_point=VECTOR_ENTRY_POINT, kwargs={"env": env, **kwargs})


def make(env: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment with Gymnasium's checking wrappers, by id, name, `module:Attr` or `file.py:Class`.

    Like `gymnasium.make`, except that the environment itself applies `max_episode_steps` (default: `max_turns` of its
    class, else 16; None: unlimited) and may return a last reward (`on_truncate`); TimeLimit would not notify it.

    Args:
        env: id, name, `module:Attr` or `file.py:Class`.
        **kwargs: fields of `agentenv.gym.GymConfig`, `render_mode`, and `disable_env_checker`.

    Raises:
        ConfigError: the environment is unknown, or an argument is wrong.
    """
    name, rest = name_of(env), dict(kwargs)
    steps = rest.pop("max_episode_steps") if "max_episode_steps" in rest else max_turns_of(name)
    return gymnasium.make(spec_of(name, {"max_episode_steps": steps}), **rest)


def make_vec(
    env: str,
    num_envs: int = 1,
    *,
    vectorization_mode: Literal["vector_entry_point", "sync", "async"] = "vector_entry_point",
    vector_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> VectorEnv[Any, Any, Any]:
    """Make a vector of environments: on one event loop (the default), in sequence, or in a process each.

    Like `gymnasium.make_vec`, with `shared_memory=False` for processes, because text has no fixed size. In all three
    modes the environments apply `max_episode_steps` themselves, as with `make`.

    Args:
        env: an id, a name, `module:Attr` or `file.py:Class`.
        num_envs: number of environments.
        vectorization_mode: "vector_entry_point" (an AgentVectorEnv), "sync" or "async".
        vector_kwargs: arguments of Gymnasium's SyncVectorEnv or AsyncVectorEnv.
        **kwargs: fields of `agentenv.gym.GymConfig`; arguments of AgentVectorEnv; `wrappers` in the other modes.

    Raises:
        ConfigError: the environment is unknown, or an argument is wrong.
    """
    name, options = name_of(env), dict(vector_kwargs or {})
    settings = kwargs if "max_episode_steps" in kwargs else {"max_episode_steps": max_turns_of(name), **kwargs}
    if vectorization_mode == "vector_entry_point":
        return gymnasium.make_vec(
            spec_of(name, {}), num_envs, vectorization_mode=vectorization_mode, vector_kwargs=options, **settings
        )
    if vectorization_mode not in _KINDS:
        raise ConfigError(
            f"agentenv.gym.make_vec: vectorization_mode: expected vector_entry_point, sync or async, got "
            f"{vectorization_mode!r}."
        )
    if vectorization_mode == "async":
        options.setdefault("shared_memory", False)
    one = partial(_make_wrapped, name, settings.pop("wrappers", None) or (), settings)
    envs = _KINDS[vectorization_mode]([one] * num_envs, **options)
    vector = {"num_envs": num_envs, "vectorization_mode": vectorization_mode, "vector_kwargs": options}
    envs.spec = spec_of(name, settings | vector)
    return envs


def _make_wrapped(env: str, wrappers: Sequence[Callable[[Any], Any]], settings: Mapping[str, Any]) -> Any:
    wrapped: Any = make(env, **settings)
    for wrapper in wrappers:
        wrapped = wrapper(wrapped)
    return wrapped


def name_of(env: str) -> str:
    """Return the name that `load_env` takes for an id; other names pass unchanged.

    Raises:
        ConfigError: no installed environment has this id, or it is not a name.
    """
    if not isinstance(env, str):
        raise ConfigError(
            f"agentenv.gym.make: expected an id, a name, module:Attr or file.py:Class, got {brief(env)}. "
            "Processes load the class by its name; save it in a file."
        )
    env_id = env.removeprefix(f"{NAMESPACE}.gym:")
    if not env_id.startswith(f"{NAMESPACE}/"):
        return env
    ids = installed_ids()
    if env_id not in ids:
        raise ConfigError(
            f"agentenv.gym.make: expected an installed environment's id ({', '.join(ids)}), got {env!r}."
            f"{did_you_mean(env_id, ids)} `agentenv list` shows what is installed."
        )
    return ids[env_id]


def _can_step(name: str) -> bool:
    try:
        return not owns_its_loop(load_env(name))
    except ConfigError:
        return False
