"""ROLL: its eight reward workers by their names, as in `worker_cls: agentenv.interop.roll.MathRuleRewardWorker`.

The worker classes are created when a name is first used, because ROLL is slow to import. Ray pickles them by this
module's path.
"""

from typing import Any

from agentenv.interop.roll.dispatch import Dispatch, data_parallel, dispatched, one_to_all, register
from agentenv.interop.roll.workers import CustomReward, RewardWorker, RollRewards, named_worker_class, worker_class
from agentenv.rewards.registry import ROLL_NAMES

__all__ = [
    "CustomReward", "Dispatch", "RewardWorker", "RollRewards", "data_parallel", "dispatched", "one_to_all", "register",
    "worker_class",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ROLL_NAMES or name == "CustomRewardWorker":
        return named_worker_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
