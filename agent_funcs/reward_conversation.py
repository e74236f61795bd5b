"""Conversations, by a model: `--reward_func_path` here, `--remote_rm_url` in OpenRLHF.

The model is named in the environment: agentenv/rewards/presets/conversation.py.
"""

from agentenv.rewards.presets.conversation import reward_func

__all__ = ["reward_func"]
