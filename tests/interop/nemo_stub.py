"""NeMo RL's interface in little, as its sources have it at 7ea279a: what an environment sees of it, traps included."""

from __future__ import annotations

import abc
import importlib
import sys
import types
from collections import UserDict
from typing import Any, NamedTuple


class EnvironmentReturn(NamedTuple):
    observations: list
    metadata: list
    next_stop_strings: list
    rewards: Any
    terminateds: Any
    answers: Any


class EnvironmentInterface(abc.ABC):
    @abc.abstractmethod
    def step(self, message_log_batch, metadata): ...

    @abc.abstractmethod
    def global_post_process_and_metrics(self, batch): ...


class BatchedDataDict(UserDict):
    pass


class PY_EXECUTABLES:
    SYSTEM = sys.executable


ENV_REGISTRY = {"reward_model": {"actor_class_fqn": "nemo_rl.environments.RewardModelEnvironment"}}
ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = {}


def register_env(env_name, actor_class_fqn):
    if env_name in ENV_REGISTRY:
        raise ValueError(f"Env name {env_name} already registered")
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}


def create_env(env_name, env_config):
    place = ENV_REGISTRY[env_name]["actor_class_fqn"]
    module, _, name = place.rpartition(".")
    actor_class = getattr(importlib.import_module(module), name)
    if place not in ACTOR_ENVIRONMENT_REGISTRY:
        raise ValueError(f"No actor environment registered for {place}")
    return actor_class.options(runtime_env={"env_vars": {}}).remote(env_config)


def installed(monkeypatch):
    """Make `nemo_rl` importable for a test."""
    own = sys.modules[__name__]
    for name in (
        "nemo_rl", "nemo_rl.environments", "nemo_rl.environments.interfaces", "nemo_rl.environments.utils",
        "nemo_rl.distributed", "nemo_rl.distributed.virtual_cluster",
        "nemo_rl.distributed.ray_actor_environment_registry",
    ):  # fmt: skip
        module = types.ModuleType(name)
        module.__dict__.update({key: value for key, value in vars(own).items() if not key.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(own, "ENV_REGISTRY", dict(ENV_REGISTRY))
    for name in ("utils", "interfaces"):
        sys.modules[f"nemo_rl.environments.{name}"].ENV_REGISTRY = own.ENV_REGISTRY
    ACTOR_ENVIRONMENT_REGISTRY.clear()
    return own
