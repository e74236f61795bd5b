"""code_sandbox: write a program that passes tests, in one attempt or several, with feedback between them."""

from agentenv_envs.code_sandbox.env import CodeSandbox

__all__ = ["CodeSandbox"]
