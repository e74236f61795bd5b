"""Code: `--reward_func_path` here, `--remote_rm_url` in OpenRLHF; agentenv/rewards/presets/code_generation.py."""

from agentenv.rewards.presets.code_generation import reward_func

__all__ = ["reward_func"]
