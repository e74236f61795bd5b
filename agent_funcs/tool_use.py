"""Questions with tools: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

Set the environment's arguments as JSON:

    AGENTENV_TOOL_USE='{"tools": ["calculator", "my_tools.py:search"], "mcp": [{"url": "http://127.0.0.1:8000/mcp"}]}'

Do not set `--data.apply_chat_template`: the template must render the tools as well.
"""

import os

from agentenv.core.arguments import parse_json_object
from agentenv.interop.molt import AgentRunner as _AgentRunner
from agentenv.interop.openrlhf import AgentExecutor as _AgentExecutor
from agentenv_envs.tool_use import ToolUse

KWARGS = parse_json_object("AGENTENV_TOOL_USE", os.environ.get("AGENTENV_TOOL_USE") or "{}")
ToolUse(**KWARGS)  # report a wrong argument now, not in every episode
LOGS = {"correct": "last", "num_calls": "sum", "num_errors": "sum", "num_malformed": "sum", "num_not_run": "sum"}


class AgentExecutor(_AgentExecutor):
    agent_cls, agent_kwargs, logs = ToolUse, KWARGS, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, agent_kwargs, logs = ToolUse, KWARGS, LOGS
