"""Gymnasium's toy games: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt."""

from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.gymnasium_text import GymnasiumText

LOGS = {"won": "last", "optimal": "sum", "illegal": "sum", "steps": "last", "total_reward": "last"}


class Game(GymnasiumText):
    row_seeds = True  # all samples of a prompt start from the same state


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = Game, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, logs = Game, AgentExecutor.logs
