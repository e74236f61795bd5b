"""A stand-in for the module `openrlhf.utils.agent`, and registration of our executor with OpenRLHF's own module.

Source: openrlhf/utils/agent.py, 0.9.1 to 0.11.2; docs of 0.8.7 to 0.9.0 for the queue-era constructor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager

from agentenv.interop.stand_in import stand_in

_AGENT = "openrlhf.utils.agent"


def register(executor_cls: type) -> None:
    """Make OpenRLHF's `issubclass` check accept our executor; does nothing if OpenRLHF is not imported."""
    base = getattr(sys.modules.get(_AGENT), "AgentExecutorBase", None)
    if base is not None and hasattr(base, "register"):
        base.register(executor_cls)


def openrlhf_stand_in(names: Mapping[str, type]) -> AbstractContextManager[None]:
    """Replace `openrlhf.utils.agent` by these classes and OpenRLHF's logger while a file is loaded; see `stand_in`.

    A file that imports more of OpenRLHF needs the real package.
    """
    modules: dict[str, Mapping[str, object]] = {
        "openrlhf": {},
        "openrlhf.utils": {},
        _AGENT: {**names, "logger": logging.getLogger(_AGENT)},
        "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
    }
    return stand_in(modules, [_AGENT])
