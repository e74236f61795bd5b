# ruff: noqa
# The form of OpenRLHF's example with pictures, for a model without any: their marks in the text stay text.
from typing import Any, Dict

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

USER_START = "\n<|im_start|>user\n"
USER_END = "<|im_end|>\n<|im_start|>assistant\n"


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.step_idx += 1
        if self.step_idx == 3:
            reward = float(states["label"].lower() in states["action_text"].lower())
            return {
                "rewards": torch.tensor(reward),
                "scores": torch.tensor(reward),
                "environment_feedback": "\n<|im_end|>\n",
                "done": True,
                "extra_logs": {"step_count": self.step_idx},
            }
        if self.step_idx == 2:
            return {
                "rewards": torch.tensor(0.0),
                "environment_feedback": f"{USER_START}<|image_pad|>\nThe new screen.\n{USER_END}",
                "environment_images": [b"a picture"],
                "done": False,
            }
        return {
            "rewards": torch.tensor(0.0),
            "environment_feedback": f"{USER_START}Not quite right.\n{USER_END}",
            "done": False,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
