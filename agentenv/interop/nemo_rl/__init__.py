"""NeMo RL: `register` makes our environments and reward models environments of NeMo RL; see `environments`."""

from typing import Any

from agentenv.interop.nemo_rl import environments
from agentenv.interop.nemo_rl.base import EnvironmentUnavailable, RowsFailed, masked
from agentenv.interop.nemo_rl.environments import AgentEnvironment, AgentEnvironmentOptions, register
from agentenv.interop.nemo_rl.records import to_records
from agentenv.interop.nemo_rl.reward_model import RewardModelEnvironment, RewardModelOptions
from agentenv.interop.nemo_rl.task_processor import TaskProcessor

__all__ = [
    "AgentEnvironment", "AgentEnvironmentOptions", "EnvironmentUnavailable",
    "RewardModelEnvironment", "RewardModelOptions", "RowsFailed", "TaskProcessor", "masked", "register", "to_records",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return one of Ray's classes, which are created on access."""
    return getattr(environments, name)
