"""Molt's side of `execute`, without Molt: what its loader, its engine and its samples are, as far as runners see it."""

import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from agentenv.testing.tokenizers import CharTokenizer
from tests.with_openrlhf.fakes import LLM, Params


class Runner(ABC):
    PRERENDER_PROMPT = True

    @abstractmethod
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images, tools): ...


@dataclass
class Trajectory:
    """The names and the order of molt.agents.base.Trajectory's fields, 0.2.1."""

    prompt: str
    label: str
    images: Any
    observation_text: str
    observation_tokens: list
    mm_train_inputs: Any = None
    pil_images: list = field(default_factory=list)
    image_budget: int = 0
    action_ranges: list = field(default_factory=list)
    off_policy_action_lens: list = field(default_factory=list)
    rollout_log_probs: list | None = None
    rollout_top_logprobs: list | None = None
    routed_experts: list | None = None
    reward: float = 0.0
    scores: float = 0.0
    truncated: bool = False
    extra_logs: dict = field(default_factory=dict)
    group_id: str | None = None
    rollout_id: str | None = None

    def absorb_routing(self, output):
        if output.outputs[0].routed_experts is not None:
            self.routed_experts = [*(self.routed_experts or []), output.outputs[0].routed_experts]


def base():
    """The module `molt.agents.base`."""
    module = types.ModuleType("molt.agents.base")
    module.Runner, module.Trajectory = Runner, Trajectory
    return module


class Router(LLM):
    """RouterGenerateClient: an output without text and prompt, and how many of its tokens are off-policy."""

    def __init__(self, script, *, stale=(), **changes):
        super().__init__(script, **changes)
        self.stale, self.sessions = list(stale), []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None, session_id=None):
        self.sessions.append(session_id)
        whole = await super().generate(list(prompt_token_ids), sampling_params, multi_modal_data)
        said = vars(whole.outputs[0])
        more = {"text": "", "routed_experts": None, "top_logprobs": None}
        made = SimpleNamespace(
            **{**{name: said[name] for name in said if name != "stop_reason"}, **more, **self.changes}
        )
        return SimpleNamespace(outputs=[made], prompt_routed_experts=None), self.stale.pop(0) if self.stale else 0


async def rollout(runner, llm, *, prompt="prompt", label="l", params=None, max_length=400, tokenizer=None, **more):
    """One call of `execute` as Molt's AgentRunnerActor makes it."""
    return await runner.execute(
        prompt=prompt, label=label, sampling_params=params or Params(), max_length=max_length,
        hf_tokenizer=tokenizer or CharTokenizer(), llm_engine=llm, **{"images": None, "tools": None, **more},
    )  # fmt: skip
