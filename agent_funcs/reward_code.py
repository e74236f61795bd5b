"""Code: `--reward_func_path` here, `--remote_rm_url` in OpenRLHF; see `agentenv.interop.openrlhf.presets`."""

from agentenv.interop.openrlhf.presets.code_generation import reward_func

__all__ = ["reward_func"]
