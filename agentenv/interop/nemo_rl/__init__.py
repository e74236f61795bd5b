"""NeMo RL: `register` makes our environments and reward models environments of NeMo RL; see `environments`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.interop.nemo_rl.environments import AgentEnvironment, AgentEnvironmentOptions, register
    from agentenv.interop.nemo_rl.records import from_records, to_records
    from agentenv.interop.nemo_rl.reward_model import RewardModelEnvironment, RewardModelOptions
    from agentenv.interop.nemo_rl.task_processor import TaskProcessor
    from agentenv.interop.nemo_rl.types import EnvironmentReturn, EnvironmentUnavailable, RowsFailed, masked

__all__ = [
    "AgentEnvironment",
    "AgentEnvironmentOptions",
    "EnvironmentReturn",
    "EnvironmentUnavailable",
    "RewardModelEnvironment",
    "RewardModelOptions",
    "RowsFailed",
    "TaskProcessor",
    "from_records",
    "masked",
    "register",
    "to_records",
]
__getattr__ = lazy_names(
    __name__,
    {
        "AgentEnvironment": "agentenv.interop.nemo_rl.environments",
        "AgentEnvironmentActor": "agentenv.interop.nemo_rl.environments",
        "AgentEnvironmentOptions": "agentenv.interop.nemo_rl.environments",
        "EnvironmentReturn": "agentenv.interop.nemo_rl.types",
        "EnvironmentUnavailable": "agentenv.interop.nemo_rl.types",
        "RewardModelEnvironment": "agentenv.interop.nemo_rl.reward_model",
        "RewardModelEnvironmentActor": "agentenv.interop.nemo_rl.environments",
        "RewardModelOptions": "agentenv.interop.nemo_rl.reward_model",
        "RowsFailed": "agentenv.interop.nemo_rl.types",
        "TaskProcessor": "agentenv.interop.nemo_rl.task_processor",
        "from_records": "agentenv.interop.nemo_rl.records",
        "masked": "agentenv.interop.nemo_rl.types",
        "register": "agentenv.interop.nemo_rl.environments",
        "to_records": "agentenv.interop.nemo_rl.records",
    },
)
