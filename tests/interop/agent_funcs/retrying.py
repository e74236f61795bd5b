# ruff: noqa
# The form of agents that drive a sandbox: an executor around the agent that tries again, OpenRLHF's own logger.
import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class SandboxError(RuntimeError):
    pass


class SandboxAgent(AgentInstanceBase):
    def __init__(self):
        self.step_count = 0

    async def reset(self, states: dict, **kwargs) -> dict:
        return {"observation": f"Solve: {states['observation']}\n"}

    async def step(self, state_dict: dict, **kwargs) -> dict:
        self.step_count += 1
        if self.step_count < 3:
            return {
                "rewards": torch.tensor(0.0),
                "scores": torch.tensor(0.0),
                "environment_feedback": f"[exit code: {self.step_count}]\n",
                "done": False,
            }
        return {
            "rewards": torch.tensor(1.0),
            "scores": torch.tensor(1.0),
            "environment_feedback": "Submitted.",
            "done": True,
            "extra_logs": {"steps": self.step_count, "empty": float(not state_dict.get("action_text"))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(SandboxAgent)

    async def execute(self, *args, **kwargs):
        for attempt in range(3):
            try:
                return await super().execute(*args, **kwargs)
            except SandboxError as e:
                logger.warning(f"attempt {attempt}: {e}")
        raise SandboxError("no sandbox")
