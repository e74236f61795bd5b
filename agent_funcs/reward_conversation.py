"""Conversations, by a classifier: `--reward_func_path` here, `--remote_rm_url` in OpenRLHF.

AGENTENV_CONVERSATION_MODEL names the model: `agentenv.interop.openrlhf.presets.conversation`.
"""

from agentenv.interop.openrlhf.presets.conversation import reward_func

__all__ = ["reward_func"]
