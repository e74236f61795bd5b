"""Ids of environments for `gymnasium.make`, and `make` and `make_vec` for those that have none.

Every installed environment `some_name` is `agentenv/SomeName-v0`. Registering reads the metadata of installed packages
and imports no environment: one that cannot be imported stands in nobody's way until somebody makes it.
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

from agentenv.endpoint.agent import owns_its_loop
from agentenv.errors import ConfigError
from agentenv.loading import installed_envs, load_env, nearest
from agentenv.types import Limits

NAMESPACE = "agentenv"
ENTRY_POINT = "agentenv.gym.env:AgentEnv"
VECTOR_ENTRY_POINT = "agentenv.gym.vector:AgentVectorEnv"
_KINDS: dict[str, type[SyncVectorEnv | AsyncVectorEnv]] = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
_UNFIT = re.compile(r"[^\w.-]+")


def id_of(env: str) -> str:
    """The id of an environment: `math_retry` and `MathRetry` of any module or file are `agentenv/MathRetry-v0`."""
    path, _, attribute = env.partition(":")
    name = attribute or (PurePath(path).stem if path.endswith(".py") else path)
    camel = "".join(part[:1].upper() + part[1:] for part in re.split(r"[_\s-]+", name))
    return f"{NAMESPACE}/{_UNFIT.sub('', camel) or 'Env'}-v0"


def installed_ids() -> dict[str, str]:
    """The names of installed environments by their ids; of two names with one id the first."""
    found: dict[str, str] = {}
    for name in installed_envs():
        found.setdefault(id_of(name), name)
    return found


def env_ids() -> list[str]:
    """The ids that can be made: of installed environments that can be imported and have no loop of their own."""
    return [env_id for env_id, name in installed_ids().items() if _can_step(name)]


def register_all() -> list[str]:
    """Register every installed environment with Gymnasium, and give the ids; importing `agentenv.gym` does it.

    What is registered already is left as it is. Episodes are truncated after `Limits.max_turns` actions (16), by
    Gymnasium's TimeLimit, unless `max_episode_steps` says otherwise. TimeLimit does not tell the environment: one that
    pays at the end (`on_truncate`) does not pay there; under `make` and in an AgentVectorEnv it does.
    """
    ids = installed_ids()
    for env_id, name in ids.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                ENTRY_POINT,
                max_episode_steps=Limits().max_turns,
                vector_entry_point=VECTOR_ENTRY_POINT,
                kwargs={"env": name},
            )
    return list(ids)


def spec_of(env: str, kwargs: Mapping[str, Any]) -> EnvSpec:
    """The spec of an environment of any kind; its JSON makes it again wherever agentenv is installed."""
    return EnvSpec(id_of(env), ENTRY_POINT, vector_entry_point=VECTOR_ENTRY_POINT, kwargs={"env": env, **kwargs})


def make(env: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """An environment under Gymnasium's checking wrappers, by id, name, `module:Attr` or `file.py:Class`.

    As `gymnasium.make`, but `max_episode_steps` (16 unless it is given; None is no limit) is told to the environment,
    which may have a last word of reward then; TimeLimit would not tell it.

    Args:
        env: which one.
        **kwargs: fields of `agentenv.gym.GymConfig`, `render_mode`, and `disable_env_checker`.

    Raises:
        ConfigError: there is no such environment, or an argument is wrong.
    """
    spec = spec_of(name_of(env), {"max_episode_steps": Limits().max_turns})
    rest = dict(kwargs)
    if "max_episode_steps" in rest:
        spec.kwargs["max_episode_steps"] = rest.pop("max_episode_steps")
    return gymnasium.make(spec, **rest)


def make_vec(
    env: str,
    num_envs: int = 1,
    *,
    vectorization_mode: Literal["vector_entry_point", "sync", "async"] = "vector_entry_point",
    vector_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> VectorEnv[Any, Any, Any]:
    """Environments in a vector: on one event loop (the default), one after another, or a process for each.

    As `gymnasium.make_vec`, with `shared_memory=False` for processes: text has no size that could be shared. All three
    tell the environments of `max_episode_steps`, as `make` does.

    Args:
        env: an id, a name, `module:Attr` or `file.py:Class`.
        num_envs: how many.
        vectorization_mode: "vector_entry_point" (an AgentVectorEnv), "sync" or "async".
        vector_kwargs: arguments of gymnasium's SyncVectorEnv or AsyncVectorEnv.
        **kwargs: fields of `agentenv.gym.GymConfig`; those of the AgentVectorEnv; `wrappers` of each in the others.

    Raises:
        ConfigError: there is no such environment, or an argument is wrong.
    """
    name, options = name_of(env), dict(vector_kwargs or {})
    settings = {"max_episode_steps": Limits().max_turns, **kwargs}
    if vectorization_mode == "vector_entry_point":
        return gymnasium.make_vec(
            spec_of(name, {}), num_envs, vectorization_mode=vectorization_mode, vector_kwargs=options, **settings
        )
    if vectorization_mode not in _KINDS:
        raise ConfigError(
            f"agentenv.gym.make_vec: vectorization_mode: expected vector_entry_point, sync or async, got "
            f"{vectorization_mode!r}. Change it."
        )
    if vectorization_mode == "async":
        options.setdefault("shared_memory", False)
    one = partial(_wrapped, name, settings.pop("wrappers", None) or (), settings)
    envs = _KINDS[vectorization_mode]([one] * num_envs, **options)
    asked = {"num_envs": num_envs, "vectorization_mode": vectorization_mode, "vector_kwargs": options}
    envs.spec = spec_of(name, settings | asked)
    return envs


def _wrapped(env: str, wrappers: Sequence[Callable[[Any], Any]], settings: Mapping[str, Any]) -> Any:
    made: Any = make(env, **settings)
    for wrapper in wrappers:
        made = wrapper(made)
    return made


def name_of(env: str) -> str:
    """What `load_env` takes, of an id or of that itself.

    Raises:
        ConfigError: no installed environment has this id.
    """
    env_id = env.removeprefix(f"{NAMESPACE}.gym:")
    if not env_id.startswith(f"{NAMESPACE}/"):
        return env
    ids = installed_ids()
    if env_id not in ids:
        raise ConfigError(
            f"agentenv.gym.make: expected an installed environment's id ({', '.join(ids)}), got {env!r}."
            f"{nearest(env_id, ids)} `agentenv list` shows what is installed."
        )
    return ids[env_id]


def _can_step(name: str) -> bool:
    try:
        return not owns_its_loop(load_env(name))
    except ConfigError:
        return False
