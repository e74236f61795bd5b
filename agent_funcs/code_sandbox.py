"""Code with tests: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt."""

from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.code_sandbox import CodeSandbox

LOGS = {"correct": "last", "first_correct": "first", "attempts": "last", "has_code": "last",
        "passed_share": "last", "tamper": "sum"}  # fmt: skip


class AgentExecutor(_AgentExecutor):
    agent_cls, logs = CodeSandbox, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, logs = CodeSandbox, AgentExecutor.logs
