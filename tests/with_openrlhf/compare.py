"""One agent class under OpenRLHF's own loop and under ours, where none of its traps bites. Run by a test."""

import asyncio
import json

import torch
from fakes import LLM, Params  # the wheel of OpenRLHF brings a package `tests`
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.interop.openrlhf import AgentExecutor

WORDS = ["I think 41.", "Then 43?", "It is 42."]


class Agent(AgentInstanceBase):
    def __init__(self):
        self.num = 0

    async def step(self, states):
        self.num += 1
        right = states["label"] in states["action_text"]
        return {
            "rewards": torch.tensor(1.0 if right else 0.125),
            "scores": torch.tensor([float(right)]),
            "environment_feedback": "" if right else f"\n\nNo ({self.num}).\n\nAssistant: ",
            "done": right,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"tries": self.num},
        }


class Ours(AgentExecutor):
    agent_cls = Agent
    logs = {"tries": "last"}  # noqa: RUF012


class Speaker(LLM):
    """Says the words one after another, with the tokens of a real tokenizer."""

    def __init__(self, tokenizer):
        super().__init__(None)
        self.tokenizer, self.num = tokenizer, 0

    def output(self, prompt_token_ids, sampling_params):
        said = WORDS[self.num]
        self.num += 1
        self.changes = {
            "token_ids": [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        }
        self.script, self.logprob = said, -0.25 * self.num
        return super().output(prompt_token_ids, sampling_params)


async def main():
    assert issubclass(Ours, AgentExecutorBase)
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    for executor in (MultiTurnAgentExecutor(Agent), Ours()):
        response = await executor.execute(
            prompt="What is 6 x 7?", label="42", sampling_params=Params(), max_length=400, hf_tokenizer=tokenizer,
            llm_engine=Speaker(tokenizer), images=None,
        )  # fmt: skip
        response["scores"] = float(response["scores"])
        response["extra_logs"] = response["extra_logs"]["tries"]
        print("RESPONSE", json.dumps(response))


if __name__ == "__main__":
    asyncio.run(main())
