"""Ready-made reward functions of OpenRLHF's form: `code_generation`, `math`, `conversation`.

Each module has `reward_func(queries, prompts, labels)`; `agent_funcs/reward_*.py` are files for `--remote_rm_url`.
"""
