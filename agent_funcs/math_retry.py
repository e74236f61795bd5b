"""Maths with retries, for `--agent_func_path`; the environment is envs/agentenv_envs/math_retry/env.py."""

from agentenv.executor import AgentExecutor as _AgentExecutor
from agentenv_envs.math_retry import MathRetry


class AgentExecutor(_AgentExecutor):
    agent_cls = MathRetry
    logs = {"correct": "last", "first_correct": "first", "attempts": "last", "has_answer": "last"}  # noqa: RUF012
