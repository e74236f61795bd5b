"""agent_funcs/rm_chat.py as OpenRLHF loads and calls it, with a policy of its shape; prints what it gives."""

import asyncio
import json
import sys
from pathlib import Path

from agentenv.engines.models import load_tokenizer, resolve_model

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/with_openrlhf"))  # the wheel of OpenRLHF brings a package `tests`
from fakes import LLM, Params  # noqa: E402

QUESTION = [{"role": "user", "content": "Hi?"}]
PROMPTS = {
    "messages": (QUESTION, {"user_turns": ["And?"]}),
    "text": ("Hi?", json.dumps({"user_turns": ["And?"]})),
    "rendered": (
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
        json.dumps({"messages": QUESTION, "user_turns": ["And?"]}),
    ),
    "rendered, and nothing else": (
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
        json.dumps({"user_turns": ["And?"]}),
    ),
}


class Policy(LLM):
    """Says "Yes.", with the tokens of a real tokenizer, and notes the last prompt."""

    def output(self, prompt_token_ids, sampling_params):
        self.said = self.tokenizer.decode(prompt_token_ids)
        eos = self.tokenizer.eos_token_id
        self.changes = {"token_ids": [*self.tokenizer.encode("Yes.", add_special_tokens=False), eos]}
        return super().output(prompt_token_ids, sampling_params)


async def main():
    """An episode of each prompt."""
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

    executor = _load_agent_executor(str(ROOT / "agent_funcs/rm_chat.py"))
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    for name, (prompt, label) in PROMPTS.items():
        policy = Policy("Yes.")
        policy.tokenizer = tokenizer
        response = await executor.execute(
            prompt=prompt, label=label, sampling_params=Params(max_tokens=50), max_length=400, hf_tokenizer=tokenizer,
            llm_engine=policy, images=None,
        )  # fmt: skip
        keys = ("reward", "scores", "extra_logs")
        told = {key: response[key] for key in keys} | {"said": getattr(policy, "said", "")}
        print("RESPONSE", json.dumps([name, told]))


if __name__ == "__main__":
    asyncio.run(main())
