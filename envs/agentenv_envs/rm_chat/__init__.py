"""rm_chat: conversations whose answers a reward model, a judge or a sum of rewards scores."""

from agentenv_envs.rm_chat.env import RMChat

__all__ = ["RMChat"]
