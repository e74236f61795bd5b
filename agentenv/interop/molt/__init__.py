"""Molt: the runner that an agent file subclasses."""

from agentenv.interop.molt.runner import AgentRunner

__all__ = ["AgentRunner"]
