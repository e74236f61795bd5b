# ruff: noqa
# The form of OpenRLHF's example for GEM: an environment of another library inside, a template written out by hand.
import logging
from typing import Any, Dict

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

logger = logging.getLogger(__name__)


class Guess:
    """A game with Gymnasium's `step`."""

    max_turns = 5

    def reset(self, seed):
        self.turn = 0
        return "Guess a number between 1 and 9.", {}

    def step(self, action):
        self.turn += 1
        right = "7" in action
        return ("Right." if right else "Too low."), float(right), right, self.turn >= self.max_turns, {}


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.env = Guess()

    async def reset(self, states: dict, **kwargs):
        observation, info = self.env.reset(kwargs.get("seed", 1))
        return {"observation": f"<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        observation, reward, terminated, truncated, info = self.env.step(states["action_text"])
        done = terminated or truncated
        self.step_idx += 1
        feedback = f"<|im_start|>user\n{observation}<|im_end|>" + ("" if done else "\n<|im_start|>assistant\n")
        if "<|im_end|>" not in states["action_text"]:
            feedback = "<|im_end|>\n" + feedback
        return {
            "rewards": torch.tensor(reward),
            "scores": torch.tensor(reward),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": torch.tensor(reward), "turn_count": torch.tensor(self.step_idx)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
