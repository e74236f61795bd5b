"""A hidden number and hints: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

The environment is envs/agentenv_envs/guess_number/env.py.
"""

from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv.molt import AgentRunner as _AgentRunner
from agentenv_envs.guess_number import GuessNumber

LOGS = {"correct": "last", "guesses": "last", "valid": "sum", "possible": "sum", "bits": "sum"}


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = GuessNumber, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, logs = GuessNumber, LOGS
