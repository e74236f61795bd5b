"""tool_use: questions that are answered with tools: functions, a sandboxed interpreter, MCP servers."""

from agentenv_envs.tool_use.env import ToolUse

__all__ = ["ToolUse"]
