"""reasoning-gym's datasets: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt."""

from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.reasoning_gym import ReasoningGym


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = (
        ReasoningGym,
        {"correct": "last", "first_correct": "first", "attempts": "last", "no_answer": "last"},
    )


class AgentRunner(_AgentRunner):
    agent_cls, logs = ReasoningGym, AgentExecutor.logs
