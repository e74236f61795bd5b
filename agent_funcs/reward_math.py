"""Mathematics: `--reward_func_path` here, `--remote_rm_url` in OpenRLHF; agentenv/rewards/presets/math.py."""

from agentenv.rewards.presets.math import reward_func

__all__ = ["reward_func"]
