"""Maths with retries: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

The environment is envs/agentenv_envs/math_retry/env.py.
"""

from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv.molt import AgentRunner as _AgentRunner
from agentenv_envs.math_retry import MathRetry

LOGS = {"correct": "last", "first_correct": "first", "attempts": "last", "has_answer": "last"}


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = MathRetry, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, logs = MathRetry, LOGS
