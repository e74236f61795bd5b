"""A stand-in for the module `openrlhf.utils.agent`, and registration of our executor with OpenRLHF's own module.

Source: openrlhf/utils/agent.py, 0.9.1 to 0.11.2; docs of 0.8.7 to 0.9.0 for the queue-era constructor.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

_AGENT = "openrlhf.utils.agent"
_LOADING = threading.RLock()
_ABSENT: Any = object()


def register(executor_cls: type) -> None:
    """Make OpenRLHF's `issubclass` check accept our executor; does nothing if OpenRLHF is not imported."""
    base = getattr(sys.modules.get(_AGENT), "AgentExecutorBase", None)
    if base is not None and hasattr(base, "register"):
        base.register(executor_cls)


def install_shim(names: Mapping[str, type]) -> None:
    """Provide `openrlhf.utils.agent` if OpenRLHF is not installed, so that its agent_func.py files load unmodified.

    The stand-in includes OpenRLHF's logger; a file that imports more of OpenRLHF needs the real package. An installed
    OpenRLHF is not replaced; see `openrlhf_stand_in`.
    """
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    package, utils = types.ModuleType("openrlhf"), types.ModuleType("openrlhf.utils")
    agent = _stand_in(names)
    package.__path__, utils.__path__ = [], []
    package.utils, utils.agent = utils, agent  # type: ignore[attr-defined]
    loggers = types.ModuleType("openrlhf.utils.logging_utils")
    loggers.init_logger = logging.getLogger  # type: ignore[attr-defined]
    utils.logging_utils = loggers  # type: ignore[attr-defined]
    for module in (package, utils, loggers):
        module.__spec__ = ModuleSpec(module.__name__, None)  # without one, find_spec("openrlhf") raises
    sys.modules.update({module.__name__: module for module in (package, utils, agent, loggers)})


def _stand_in(names: Mapping[str, type]) -> types.ModuleType:
    agent = types.ModuleType(_AGENT, "agentenv's stand-in for OpenRLHF's module of this name.")
    agent.__spec__ = ModuleSpec(_AGENT, None)
    vars(agent).update(names, logger=logging.getLogger(_AGENT))
    return agent


@contextmanager
def openrlhf_stand_in(names: Mapping[str, type]) -> Iterator[None]:
    """Replace `openrlhf.utils.agent` by these classes while a file is loaded, even if OpenRLHF is installed.

    A file written for another version than the installed one then loads too. Afterwards an installed OpenRLHF is
    unchanged: its other modules are never touched, and this one is restored if it was imported before.
    """
    with _LOADING:
        install_shim(names)
        utils = sys.modules.get("openrlhf.utils", types.ModuleType(""))
        real, attribute = sys.modules.get(_AGENT), getattr(utils, "agent", _ABSENT)
        if getattr(real, "MultiTurnAgentExecutor", None) is names["MultiTurnAgentExecutor"]:
            yield  # OpenRLHF is not installed: keep the stand-in for what the file imports later
            return
        sys.modules[_AGENT] = utils.agent = _stand_in(names)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del sys.modules[_AGENT]
            if real is not None:
                sys.modules[_AGENT] = real
            if attribute is _ABSENT:
                del utils.agent
            else:
                utils.agent = attribute  # type: ignore[attr-defined]
