"""Every installed environment as a `gymnasium.Env`, and Gymnasium's environments as agent environments.

Importing this package registers the installed environments (`agentenv/MathRetry-v0`, …) and imports none of them:

    gymnasium.make("agentenv.gym:agentenv/MathRetry-v0")
    agentenv.gym.make("guess.py:Guess", data="guess.jsonl")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names
from agentenv.gym.registration import env_ids as env_ids
from agentenv.gym.registration import make as make
from agentenv.gym.registration import make_vec as make_vec
from agentenv.gym.registration import register_all as register_all

if TYPE_CHECKING:
    from agentenv.gym.config import EpisodeMaker as EpisodeMaker
    from agentenv.gym.config import GymConfig as GymConfig
    from agentenv.gym.env import AgentEnv as AgentEnv
    from agentenv.gym.spaces import AnyText as AnyText
    from agentenv.gym.spaces import Messages as Messages
    from agentenv.gym.spaces import TokenSeq as TokenSeq
    from agentenv.gym.vector import AgentVectorEnv as AgentVectorEnv

__getattr__ = lazy_names(__name__)


register_all()
