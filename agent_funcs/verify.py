"""Any verifiable reward: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt."""

from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.verify import Verify


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = Verify, {"correct": "last"}


class AgentRunner(_AgentRunner):
    agent_cls, logs = Verify, AgentExecutor.logs
