"""Chat scored by a reward model: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

    AGENTENV_RM_CHAT='{"reward": {"model": {"rm": "http://127.0.0.1:5000/get_reward",
                                            "rm_args": {"tokenizer": "RM"}, "scale": 0.5}}, "when": "end"}'

has the arguments of the environment, envs/agentenv_envs/rm_chat/env.py, as JSON. In OpenRLHF every engine's actor has a
scorer of its own: name a server (`agentenv rm serve`) where the model is large. Leave `--data.apply_chat_template` off,
so that the reward model sees what was said and not what the policy's template made of it.
"""

import os

from agentenv.config import parse_json_object
from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv.molt import AgentRunner as _AgentRunner
from agentenv_envs.rm_chat import RMChat

KWARGS = parse_json_object("AGENTENV_RM_CHAT", os.environ.get("AGENTENV_RM_CHAT") or "{}")
RMChat(**KWARGS)  # nothing is loaded; what is wrong shows now, and not in every episode
LOGS = {"turns": "last", "cut": "last", "rm/reward": "last", "rm/value": "last", "rm/length_chars": "mean",
        "rm/length_words": "mean", "rm/truncated": "sum", "rm/clipped": "sum", "rm/no_answer": "sum",
        "rm/num_retried": "sum"}  # fmt: skip


class AgentExecutor(_AgentExecutor):
    agent_cls, agent_kwargs, logs = RMChat, KWARGS, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, agent_kwargs, logs = RMChat, KWARGS, LOGS
