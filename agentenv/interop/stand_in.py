"""Stand-ins for modules that agent files import, whether or not the package of these modules is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

_LOADING = threading.RLock()  # guards sys.modules while a file is loaded


@contextmanager
def stand_in(modules: Mapping[str, Mapping[str, object]], replaced: Sequence[str]) -> Iterator[None]:
    """Offer modules while a file is loaded; a file written for another version of their package then loads too.

    If the package is not installed, they stay for what the file imports later. Else only those of `replaced` stand in,
    and afterwards the package is as before.

    Args:
        modules: the names in each module, beginning with the package; each after the one that holds it.
        replaced: those to replace in an installed package, beginning with the one that holds the others.
    """
    package, (above, _, name) = next(iter(modules)), replaced[0].rpartition(".")
    with _LOADING:
        made = _made(modules)
        known = sys.modules.get(package)
        is_ours = getattr(known, "__path__", None) == []  # of an earlier file
        if is_ours or (known is None and importlib.util.find_spec(package) is None):
            sys.modules.update(made)
            yield
            return
        # Nothing below the package is imported: `openrlhf.utils` would import torch.
        holder = importlib.import_module(package) if above == package else sys.modules.get(above, ModuleType(above))
        real, attribute = {each: sys.modules.get(each) for each in replaced}, getattr(holder, name, None)
        sys.modules.update({each: made[each] for each in replaced})
        setattr(holder, name, made[replaced[0]])
        try:
            yield
        finally:
            delattr(holder, name)
            if attribute is not None:
                setattr(holder, name, attribute)
            for each, module in real.items():
                del sys.modules[each]
                if module is not None:
                    sys.modules[each] = module


def _made(modules: Mapping[str, Mapping[str, object]]) -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = {}
    for name, names in modules.items():
        above, _, own = name.rpartition(".")
        module = made[name] = ModuleType(name, "agentenv's stand-in for the module of this name.")
        module.__spec__ = ModuleSpec(name, None)  # without one, find_spec raises
        module.__path__ = []
        vars(module).update(names)
        if above in made:
            setattr(made[above], own, module)
    return made
