"""Every installed environment as a `gymnasium.Env`, and Gymnasium's environments as agent environments.

Importing this package registers the installed environments (`agentenv/MathRetry-v0`, …) and imports none of them:

    gymnasium.make("agentenv.gym:agentenv/MathRetry-v0")
    agentenv.gym.make("guess.py:Guess", data="guess.jsonl")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names
from agentenv.gym.registration import env_ids, make, make_vec, register_all

if TYPE_CHECKING:
    from agentenv.gym.config import EpisodeMaker, GymConfig
    from agentenv.gym.env import AgentEnv
    from agentenv.gym.spaces import AnyText, Messages, TokenSeq
    from agentenv.gym.vector import AgentVectorEnv

__all__ = [
    "AgentEnv", "AgentVectorEnv", "AnyText", "EpisodeMaker", "GymConfig", "Messages", "TokenSeq", "env_ids", "make",
    "make_vec", "register_all",
]  # fmt: skip
__getattr__ = lazy_names(__name__)


register_all()
