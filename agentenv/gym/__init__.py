"""Every installed environment as a `gymnasium.Env`, and Gymnasium's environments as agent environments.

Importing this registers the installed environments (`agentenv/MathRetry-v0` and so on) and imports none of them:

    gymnasium.make("agentenv.gym:agentenv/MathRetry-v0")
    agentenv.gym.make("guess.py:Guess", data="guess.jsonl")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentenv.gym.registration import env_ids, make, make_vec, register_all

if TYPE_CHECKING:
    from agentenv.gym.config import EpisodeMaker, GymConfig
    from agentenv.gym.env import AgentEnv
    from agentenv.gym.spaces import AnyText, Messages, TokenSeq
    from agentenv.gym.vector import AgentVectorEnv

_LAZY = {
    "AgentEnv": "env",
    "AgentVectorEnv": "vector",
    "AnyText": "spaces",
    "EpisodeMaker": "config",
    "GymConfig": "config",
    "Messages": "spaces",
    "TokenSeq": "spaces",
}
"""Where the other public names are; each is imported at its first use."""

__all__ = [
    "AgentEnv",
    "AgentVectorEnv",
    "AnyText",
    "EpisodeMaker",
    "GymConfig",
    "Messages",
    "TokenSeq",
    "env_ids",
    "make",
    "make_vec",
    "register_all",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_all()
