"""OpenRLHF's executor of one answer, for agent_func.py files that build on it.

Source: openrlhf/utils/agent.py, SingleTurnAgentExecutor, 0.9.1 to 0.11.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import StepResult, Task
from agentenv.episode.registry import load_file
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.interop.openrlhf.executor import AgentExecutor
from agentenv.interop.openrlhf.response import without_response_reward
from agentenv.interop.openrlhf.reward_func import RewardFunction, RewardSource
from agentenv.interop.openrlhf.reward_server import RewardServers


class OneAnswer(AgentInstance):
    """The environment of one answer, which says nothing about its worth."""

    score_range = None

    async def step(self, states: StepState) -> StepResult:
        """End the episode."""
        cut = states["finish_reason"] == "length"
        return StepResult(terminated=not cut, truncated=cut)


class SingleTurnAgentExecutor(AgentExecutor):
    """Samples one answer. Its reward is that of `remote_rm_url`, else None until a subclass sets it in the response."""

    agent_cls = OneAnswer

    def __init__(self, remote_rm_url: str | Sequence[str] | None = None) -> None:
        """Take a FILE.py with `reward_func`, or addresses of reward servers."""
        super().__init__()
        self.reward_endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())
        self._judged: RewardSource | None = None
        if self.reward_endpoints and self.reward_endpoints[0].endswith(".py"):
            path = self.reward_endpoints[0]
            self._judged = RewardSource(RewardFunction(load_file(path).reward_func, f"{path}: reward_func"))
        elif self.reward_endpoints:
            self._judged = RewardSource(RewardServers(self.reward_endpoints))

    async def execute(self, prompt: Any, label: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return OpenRLHF's response dict of one answer; the arguments are those of `AgentExecutor.execute`."""
        response = await super().execute(prompt, label, sampling_params, *args, **kwargs)
        return without_response_reward(response) if self._judged is None else response

    async def _play(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        return await (super()._play(task, setup, key) if self._judged is None else self._judged.run(task, setup, key))
