# ruff: noqa
# The form of OpenRLHF's README since 0.9.1: no queue, the class handed to the executor.
import random
from typing import Any, Dict

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = random.randint(2, 2)

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.step_idx += 1
        done = self.step_idx >= self.max_steps
        reward = torch.tensor(float(done))
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else "\n\nHuman: [HINT] check again\n\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": reward},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
