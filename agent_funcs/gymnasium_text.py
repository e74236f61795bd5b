"""Gymnasium's toy games: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

The environment is envs/agentenv_envs/gymnasium_text/env.py.
"""

from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv.molt import AgentRunner as _AgentRunner
from agentenv_envs.gymnasium_text import GymnasiumText

LOGS = {"won": "last", "optimal": "sum", "illegal": "sum", "steps": "last", "total_reward": "last"}


class Game(GymnasiumText):
    row_seeds = True  # so that all samples of a prompt begin alike


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = Game, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, logs = Game, LOGS
