"""ROLL: its eight reward workers by their names, as in `worker_cls: agentenv.interop.roll.MathRuleRewardWorker`.

The worker classes are created when a name is first used, because ROLL is slow to import. Ray pickles them by this
module's path.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentenv._util.lazy import lazy_names
from agentenv.rewards.registry import ROLL_NAMES

if TYPE_CHECKING:
    from agentenv.interop.roll.dispatch import Dispatch, data_parallel, dispatched, one_to_all, register
    from agentenv.interop.roll.workers import CustomReward, RewardWorker, RollRewards, worker_class

__all__ = [
    "CustomReward",
    "Dispatch",
    "RewardWorker",
    "RollRewards",
    "data_parallel",
    "dispatched",
    "one_to_all",
    "register",
    "worker_class",
]
_names = lazy_names(
    __name__,
    {
        "CustomReward": "agentenv.interop.roll.workers",
        "Dispatch": "agentenv.interop.roll.dispatch",
        "RewardWorker": "agentenv.interop.roll.workers",
        "RollRewards": "agentenv.interop.roll.workers",
        "data_parallel": "agentenv.interop.roll.dispatch",
        "dispatched": "agentenv.interop.roll.dispatch",
        "one_to_all": "agentenv.interop.roll.dispatch",
        "register": "agentenv.interop.roll.dispatch",
        "worker_class": "agentenv.interop.roll.workers",
    },
)


def __getattr__(name: str) -> Any:
    if name in ROLL_NAMES or name == "CustomRewardWorker":
        return import_module(f"{__name__}.workers").named_worker_class(name)
    return _names(name)
