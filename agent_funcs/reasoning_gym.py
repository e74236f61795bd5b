"""reasoning-gym's datasets: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

The environment is envs/agentenv_envs/reasoning_gym/env.py.
"""

from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv.molt import AgentRunner as _AgentRunner
from agentenv_envs.reasoning_gym import ReasoningGym

LOGS = {"correct": "last", "first_correct": "first", "attempts": "last", "no_answer": "last"}


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = ReasoningGym, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, logs = ReasoningGym, LOGS
