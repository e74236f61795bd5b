"""math_retry: solve a math question within a few attempts, with feedback after each failed one."""

from agentenv_envs.math_retry.env import MathRetry

__all__ = ["MathRetry"]
