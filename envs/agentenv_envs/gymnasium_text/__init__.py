"""gymnasium_text: Gymnasium's toy games in words: FrozenLake, CliffWalking, Taxi and Blackjack."""

from agentenv_envs.gymnasium_text.env import GymnasiumText

__all__ = ["GymnasiumText"]
