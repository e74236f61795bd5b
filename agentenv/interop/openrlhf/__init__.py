"""OpenRLHF: the executor that an agent_func.py subclasses, and episodes as the dicts that its trainer reads."""

from agentenv.interop.openrlhf.executor import AgentExecutor
from agentenv.interop.openrlhf.response import LogRule, ResponseDict, from_response, to_response

__all__ = ["AgentExecutor", "LogRule", "ResponseDict", "from_response", "to_response"]
