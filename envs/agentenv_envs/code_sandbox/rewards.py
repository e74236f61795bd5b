"""A reward function for code: OpenRLHF's `--remote_rm_url` form, for one answer per prompt.

    # reward_func.py
    from agentenv_envs.code_sandbox.rewards import reward_func

    python -m openrlhf.cli.train_ppo_ray --remote_rm_url reward_func.py --label_key label …

It is the library's preset. Its tests come from the label, in any form that `datasets` reads.
"""

from __future__ import annotations

from agentenv.interop.openrlhf.presets.code_generation import reward_func

__all__ = ["reward_func"]
