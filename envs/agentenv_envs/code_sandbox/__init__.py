"""code_sandbox: write a program that passes tests, in one attempt or several, with what failed said in between."""

from agentenv_envs.code_sandbox.env import CodeSandbox

__all__ = ["CodeSandbox"]
