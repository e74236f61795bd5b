"""`agentenv audit`."""

from __future__ import annotations

from collections.abc import Sequence


def audit(args: Sequence[str]) -> int:
    """Play an environment with policies that solve nothing, cheat and break things, and report what they earn."""
    return 0
