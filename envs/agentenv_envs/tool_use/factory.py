"""From settings to a toolset: built-in tools, tools from files, MCP servers."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentenv.errors import ConfigError
from agentenv.rewards.loading import load_function, settings_from
from agentenv.rewards.rules.code.reward import shared_sandbox
from agentenv.sandbox.types import ExecLimits
from agentenv.tools.mcp import McpServer
from agentenv.tools.python import PythonTool
from agentenv.tools.toolset import Source, Tool, Toolset
from agentenv_envs.tool_use.calculator import calculator

LIMITS = ExecLimits(cpu_s=5.0, wall_s=20.0)
"""Limits of one call of `python`."""
_LIMITS = sorted(set(inspect.signature(Toolset).parameters) - {"sources"})


@dataclass(frozen=True, slots=True)
class PythonSource:
    """The tool `python`: an interpreter for each episode, in the sandbox that all episodes share."""

    sandbox: Mapping[str, Any]
    """Options of `open_sandbox`."""
    limits: ExecLimits
    max_chars: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Yield one episode's tool; its interpreter starts with the first call."""
        shared: Any = await shared_sandbox(self.sandbox)
        async with PythonTool(shared, limits=self.limits, max_chars=self.max_chars) as tool:
            yield [Tool.of(tool.python)]


def toolset(tools: Sequence[Any], mcp: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> Toolset:
    """Return the tools that settings describe.

    Raises:
        ConfigError: the settings do not describe tools.
    """
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ConfigError(f"ToolUse.tools: expected a list, got {tools!r:.80}. Put it in a list.")
    if isinstance(mcp, str | Mapping) or not isinstance(mcp, Sequence):
        raise ConfigError(f"ToolUse.mcp: expected a list of servers, got {mcp!r:.80}. Put it in a list.")
    if wrong := sorted(set(limits) - set(_LIMITS)):
        raise ConfigError(f"ToolUse.limits: expected some of {', '.join(_LIMITS)}, got {wrong}.")
    max_chars = limits.get("max_chars", 4000)
    sources = [*(_source(each, max_chars) for each in tools), *(McpServer.of(each) for each in mcp)]
    if not sources:
        raise ConfigError("ToolUse.tools: expected at least one tool, got none. Name one, or a server in `mcp`.")
    return Toolset(*sources, **{"max_chars": max_chars, **limits})


def _source(spec: Any, max_chars: int) -> Source:
    name: Any = spec
    options: Mapping[str, Any] = {}
    if isinstance(spec, Mapping):
        if len(spec) != 1 or not isinstance(next(iter(spec.values())), Mapping):
            raise ConfigError(f'ToolUse.tools: expected {{"python": {{…}}}}, got {dict(spec)!r:.80}.')
        ((name, options),) = spec.items()
    if name == "python":
        if wrong := sorted(set(options) - {"sandbox", "limits"}):
            raise ConfigError(f"ToolUse.tools: python: expected some of sandbox, limits, got {wrong}.")
        limits = settings_from("ToolUse.tools: python.limits", options.get("limits"), LIMITS)
        return PythonSource(dict(options.get("sandbox") or {}), limits, max_chars)
    if options:
        raise ConfigError(f"ToolUse.tools: expected options for python only, got {dict(spec)!r:.80}. Remove them.")
    if name == "calculator":
        return calculator
    if isinstance(name, str):
        if ":" not in name:
            raise ConfigError(f"ToolUse.tools: expected calculator, python, FILE.py:name or module:name, got {name!r}.")
        return load_function(name)
    source: Source = name
    return source
