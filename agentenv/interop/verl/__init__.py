"""verl: our environments in its agent loop, reward managers, and episodes as its AgentLoopOutput.

verl loads `agentenv.interop.verl.plugin` at each start, so this face imports nothing before a name is used. The module
that verl's configuration names is `pkg://agentenv.interop.verl.rewards`, which has `compute_score` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.interop.verl.agent_loop import EnvAgentLoop as EnvAgentLoop
    from agentenv.interop.verl.agent_loop import check as check
    from agentenv.interop.verl.agent_loop import dataset as dataset
    from agentenv.interop.verl.records import to_records as to_records
    from agentenv.interop.verl.rewards import RMGalleryRewardManager as RMGalleryRewardManager

__getattr__ = lazy_names(__name__, {"AgentEnvRewardManager": "agentenv.interop.verl.rewards"})
