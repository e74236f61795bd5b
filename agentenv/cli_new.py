"""`agentenv new`."""

from __future__ import annotations

from collections.abc import Sequence


def new(args: Sequence[str]) -> int:
    """Make a plugin of your own: an environment, its data, its tests, ready to install."""
    return 0
