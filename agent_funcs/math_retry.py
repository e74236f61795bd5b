"""Math with retries: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt."""

from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.math_retry import MathRetry


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = MathRetry, {"correct": "last", "first_correct": "first", "attempts": "last", "has_answer": "last"}


class AgentRunner(_AgentRunner):
    agent_cls, logs = MathRetry, AgentExecutor.logs
