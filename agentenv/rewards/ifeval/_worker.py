"""Judges texts in a worker of `rewards/pool.py`."""

from __future__ import annotations

from typing import Any

from agentenv.rewards.ifeval.instructions import Instruction, judged


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """`{"followed": [bool, …]}` of `{"text", "mode", "instructions": [[name, parameters], …]}`.

    Raises:
        MissingDependency: a text's language must be detected, and langdetect is not installed.
    """
    instructions = [Instruction(name, params) for name, params in request["instructions"]]
    return {"followed": judged(instructions, request["text"], request["mode"])}
