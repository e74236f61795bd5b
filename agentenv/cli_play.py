"""`agentenv play`."""

from __future__ import annotations

from collections.abc import Sequence


def play(args: Sequence[str]) -> int:
    """Take the policy's place in an environment, in the terminal."""
    return 0
