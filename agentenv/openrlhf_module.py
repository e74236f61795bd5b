"""The module `openrlhf.utils.agent`: ours in the place of OpenRLHF's, and ours in the eyes of OpenRLHF's own.

Source: openrlhf/utils/agent.py, 0.9.1 to 0.11.2; docs of 0.8.7 to 0.9.0 for the queue-era constructor.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

_AGENT = "openrlhf.utils.agent"
_LOADING = threading.RLock()
_ABSENT: Any = object()


def register(executor_cls: type) -> None:
    """Make OpenRLHF's `issubclass` check accept our executor; does nothing where OpenRLHF is not imported."""
    module = sys.modules.get(_AGENT)
    base = getattr(module, "AgentExecutorBase", None)
    if base is not None and hasattr(base, "register"):
        base.register(executor_cls)


def install_shim(executor_base: type, instance_base: type) -> None:
    """Offer `openrlhf.utils.agent` where OpenRLHF is not installed, so that its agent_func.py files load unmodified.

    Its logger comes along; a file that needs more of OpenRLHF needs OpenRLHF. Where that is installed nothing is
    replaced; see `stand_in`.
    """
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    package, utils = types.ModuleType("openrlhf"), types.ModuleType("openrlhf.utils")
    agent = _stand_in(executor_base, instance_base)
    package.__path__, utils.__path__ = [], []
    package.utils, utils.agent = utils, agent  # type: ignore[attr-defined]
    loggers = types.ModuleType("openrlhf.utils.logging_utils")
    loggers.init_logger = logging.getLogger  # type: ignore[attr-defined]
    utils.logging_utils = loggers  # type: ignore[attr-defined]
    for module in (package, utils, loggers):
        module.__spec__ = ModuleSpec(module.__name__, None)  # without one, find_spec("openrlhf") raises
    sys.modules.update({module.__name__: module for module in (package, utils, agent, loggers)})


def _stand_in(executor_base: type, instance_base: type) -> types.ModuleType:
    agent = types.ModuleType(_AGENT, "agentenv's stand-in for OpenRLHF's module of this name.")
    agent.__spec__ = ModuleSpec(_AGENT, None)
    for name in ("AgentExecutorBase", "MultiTurnAgentExecutor"):
        setattr(agent, name, executor_base)
    agent.AgentInstanceBase = instance_base  # type: ignore[attr-defined]
    return agent


@contextmanager
def stand_in(executor_base: type, instance_base: type) -> Iterator[None]:
    """For the time that a file is loaded, `openrlhf.utils.agent` is our module, also where OpenRLHF is installed.

    A file of another contract than that of the installed version then loads too. Afterwards an installed OpenRLHF is as
    it was: its other modules are never touched, and this one, if it was imported before, is back in its place.
    """
    with _LOADING:
        install_shim(executor_base, instance_base)
        utils = sys.modules.get("openrlhf.utils", types.ModuleType(""))
        real, attribute = sys.modules.get(_AGENT), getattr(utils, "agent", _ABSENT)
        if getattr(real, "MultiTurnAgentExecutor", None) is executor_base:
            yield  # not installed: the stand-in stays for what the file imports later
            return
        sys.modules[_AGENT] = utils.agent = _stand_in(executor_base, instance_base)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            _put_back(real, utils, attribute)


def _put_back(real: types.ModuleType | None, utils: types.ModuleType, attribute: Any) -> None:
    del sys.modules[_AGENT]
    if real is not None:
        sys.modules[_AGENT] = real
    if attribute is _ABSENT:
        del utils.agent
    else:
        utils.agent = attribute  # type: ignore[attr-defined]
