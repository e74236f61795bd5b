"""Makes our reward managers known to verl under their names; verl loads this as an entry point of `verl.plugins`.

`reward.reward_manager.name=agentenv` is then `AgentEnvRewardManager`, and `RMGalleryRewardManager` is in the older
registry, `verl.workers.reward_manager`. verl imports this at each start, in every worker, and hides what it raises: so
it imports nothing of verl, and nothing heavy. It waits until verl imports a registry, and registers then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _register_single(module: Any) -> None:
    from agentenv.interop.verl_loop import reward_manager_class

    module.register("agentenv")(reward_manager_class())


def _register_batch(module: Any) -> None:
    from agentenv.interop.verl_rewards import RMGalleryRewardManager

    module.register("RMGalleryRewardManager")(RMGalleryRewardManager)


REGISTRIES: Mapping[str, Callable[[Any], None]] = {
    "verl.experimental.reward_loop.reward_manager": _register_single,
    "verl.workers.reward_manager": _register_batch,
}
"""What to do when verl has imported a module."""


class _Registries(MetaPathFinder):
    """Finds the registries as Python does, and has us told when one was imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a registry; None for any other module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in REGISTRIES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, REGISTRIES[fullname])
        return spec


class _Then(Loader):
    """A loader, and what to do with the module that it has loaded."""

    def __init__(self, loader: Loader, then: Callable[[Any], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader itself."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the loader itself, which the module then has; afterwards we register."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def install() -> None:
    """Register with the registries that verl has imported, and with the others when it does; once is enough."""
    if not any(isinstance(finder, _Registries) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registries())
    for name, register in REGISTRIES.items():
        if name in sys.modules:
            register(sys.modules[name])


install()
