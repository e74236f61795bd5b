"""A hidden number and hints: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt."""

from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.guess_number import GuessNumber

LOGS = {"correct": "last", "guesses": "last", "valid": "sum", "possible": "sum", "bits": "sum"}


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = GuessNumber, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, logs = GuessNumber, AgentExecutor.logs
