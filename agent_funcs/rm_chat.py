"""Chat scored by a reward model: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

Set the environment's arguments as JSON:

    AGENTENV_RM_CHAT='{"reward": {"model": {"rm": "http://127.0.0.1:5000/get_reward",
                                            "rm_args": {"tokenizer": "RM"}, "scale": 0.5}}, "when": "end"}'

In OpenRLHF every engine's actor loads its own scorer: for a large model, start `agentenv rm serve` and name the server.
Do not set `--data.apply_chat_template`: the reward model must see the messages, not the policy's rendering of them.
"""

import os

from agentenv.core.arguments import parse_json_object
from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.rm_chat import RMChat

KWARGS = parse_json_object("AGENTENV_RM_CHAT", os.environ.get("AGENTENV_RM_CHAT") or "{}")
RMChat(**KWARGS)  # loads nothing; report a wrong argument now, not in every episode
LOGS = {"turns": "last", "cut": "last", "rm/reward": "last", "rm/value": "last", "rm/length_chars": "mean",
        "rm/length_words": "mean", "rm/truncated": "sum", "rm/clipped": "sum", "rm/no_answer": "sum",
        "rm/num_retried": "sum"}  # fmt: skip


class AgentExecutor(_AgentExecutor):
    agent_cls, agent_kwargs, logs = RMChat, KWARGS, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, agent_kwargs, logs = RMChat, KWARGS, LOGS
