"""Any verifiable reward: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

The environment is envs/agentenv_envs/verify/env.py; without a column `domain`, the label says it.
"""

from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv.molt import AgentRunner as _AgentRunner
from agentenv_envs.verify import Verify


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = Verify, {"correct": "last"}


class AgentRunner(_AgentRunner):
    agent_cls, logs = Verify, {"correct": "last"}
