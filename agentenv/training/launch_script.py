"""What the scripts of `agentenv launch` for TRL, verl, tinker-cookbook and SkyRL have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScriptConfig:
    """Flags of a script that trains an environment in another trainer."""

    env: str
    """The environment: an installed name, module:Attr or FILE.py:Attr."""
    data: str
    """Tasks: FILE.jsonl, FILE.parquet, a Hugging Face dataset id, or a built-in name."""
    model: str
    """The policy: a folder or a Hugging Face id."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor, as JSON."""
    max_turns: int = 16
    """Maximum number of turns of an episode."""
    max_tokens: int | None = None
    """Maximum number of new tokens of one action."""
    learning_rate: float = 1e-6
    """Learning rate."""
    temperature: float = 1.0
    """Temperature of sampling."""
    max_steps: int = 100
    """Number of steps of the trainer."""
    seed: int = 42
    """Seed of the trainer and of the episodes."""
