"""The hacks that an environment class names, for the auditor and the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.errors import ConfigError


def hacks_of(cls: type[Any]) -> Mapping[str, str]:
    """Return the hacks that a class names.

    Raises:
        ConfigError: they are not a mapping of names to actions.
    """
    hacks = getattr(cls, "hacks", {})
    if not isinstance(hacks, Mapping) or not all(isinstance(text, str) for pair in hacks.items() for text in pair):
        raise ConfigError(
            f"{cls.__name__}.hacks: expected a mapping of names to actions, got {hacks!r:.200}. Write "
            'hacks = {"name": "action"} in the class.'
        )
    return hacks
