"""reasoning_gym: the 105 procedural datasets of reasoning-gym, graded so that a hostile answer does no harm."""

from agentenv_envs.reasoning_gym.env import ReasoningGym
from agentenv_envs.reasoning_gym.reward import ReasoningGymReward

__all__ = ["ReasoningGym", "ReasoningGymReward"]
