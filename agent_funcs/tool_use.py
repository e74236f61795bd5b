"""Questions with tools: `--agent_func_path` here and in OpenRLHF, `--train.agent_path` in Molt.

    AGENTENV_TOOL_USE='{"tools": ["calculator", "my_tools.py:search"], "mcp": [{"url": "http://127.0.0.1:8000/mcp"}]}'

has the arguments of the environment, envs/agentenv_envs/tool_use/env.py, as JSON. Leave `--data.apply_chat_template`
off: the template is to render the tools as well.
"""

import os

from agentenv.config import parse_json_object
from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv.molt import AgentRunner as _AgentRunner
from agentenv_envs.tool_use import ToolUse

KWARGS = parse_json_object("AGENTENV_TOOL_USE", os.environ.get("AGENTENV_TOOL_USE") or "{}")
ToolUse(**KWARGS)  # what is wrong shows now, and not in every episode
LOGS = {"correct": "last", "num_calls": "sum", "num_errors": "sum", "num_malformed": "sum", "num_not_run": "sum"}


class AgentExecutor(_AgentExecutor):
    agent_cls, agent_kwargs, logs = ToolUse, KWARGS, LOGS


class AgentRunner(_AgentRunner):
    agent_cls, agent_kwargs, logs = ToolUse, KWARGS, LOGS
