"""verify: one answer, graded by the verifiable reward of its domain, or by one that settings describe."""

from agentenv_envs.verify.env import Verify

__all__ = ["Verify"]
