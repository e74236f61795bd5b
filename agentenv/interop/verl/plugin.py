"""Registers our reward managers and environments with verl. verl loads this entry point of `verl.plugins`.

`reward.reward_manager.name=agentenv` then means `AgentEnvRewardManager`; `RMGalleryRewardManager` is in the older
registry, `verl.workers.reward_manager`; `rollout.agent.default_agent_loop=agentenv/math_retry` means `EnvAgentLoop`
with that environment, and likewise for every installed one. verl imports this module at each start, in every worker,
and hides its exceptions. So it imports nothing of verl and nothing heavy: it registers when verl imports a registry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _register_single(module: Any) -> None:
    from agentenv.interop.verl.reward_manager import reward_manager_class

    module.register("agentenv")(reward_manager_class())


def _register_batch(module: Any) -> None:
    from agentenv.interop.verl.rewards import RMGalleryRewardManager

    module.register("RMGalleryRewardManager")(RMGalleryRewardManager)


def _register_loops(module: Any) -> None:
    from agentenv.episode.registry import installed_envs

    target = "agentenv.interop.verl.agent_loop.EnvAgentLoop"
    for name in installed_envs():
        module._agent_loop_registry[f"agentenv/{name}"] = {"_target_": target, "env": name}


REGISTRIES: Mapping[str, Callable[[Any], None]] = {
    "verl.experimental.reward_loop.reward_manager": _register_single,
    "verl.workers.reward_manager": _register_batch,
    "verl.experimental.agent_loop.agent_loop": _register_loops,
}
"""What to call when verl has imported a registry module."""


class _Registries(MetaPathFinder):
    """Finds the registries as Python does, and adds a call after their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a registry; None for any other module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in REGISTRIES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, REGISTRIES[fullname])
        return spec


class _Then(Loader):
    """A loader that calls a function with the module after loading it."""

    def __init__(self, loader: Loader, then: Callable[[Any], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with the wrapped loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the wrapped loader, give it that loader, then call the function."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def install() -> None:
    """Register with the imported registries now, and with the others when verl imports them."""
    if not any(isinstance(finder, _Registries) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registries())
    for name, register in REGISTRIES.items():
        if name in sys.modules:
            register(sys.modules[name])


install()
