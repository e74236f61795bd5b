"""OpenRLHF's side of `execute`, without OpenRLHF: its engine's signature and vLLM's outputs."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.interop.openrlhf import AgentExecutor
from agentenv.testing.tokenizers import CharTokenizer


@dataclass
class Params:
    """As OpenRLHF makes vLLM's: the defaults are vLLM's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 1
    stop: list = field(default_factory=list)
    stop_token_ids: list = field(default_factory=list)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = 1
    include_stop_str_in_output: bool = True
    skip_special_tokens: bool = False


class LLM:
    """`RolloutRayActor.generate`: says the script's turns in order, and again for every episode."""

    def __init__(self, script, *, logprob=-0.5, latency_s=0.0, **changes):
        self.script, self.logprob, self.latency_s, self.changes = script, logprob, latency_s, changes
        self.tokenizer, self.requests = CharTokenizer(), []
        self.live = self.most_live = 0

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        assert multi_modal_data is None
        self.requests.append((prompt_token_ids, sampling_params))
        self.live += 1
        self.most_live = max(self.live, self.most_live)
        await asyncio.sleep(self.latency_s)
        self.live -= 1
        return self.output(prompt_token_ids, sampling_params)

    def output(self, prompt_token_ids, sampling_params):
        said = self.script(prompt_token_ids) if callable(self.script) else self.script
        if isinstance(said, Exception):
            raise said
        ids, reason = [*self.tokenizer.encode(said), 0], "stop"
        if len(ids) > sampling_params.max_tokens:
            ids, reason = ids[: sampling_params.max_tokens], "length"
        ids = self.changes.get("token_ids", ids)
        entries = [{i: SimpleNamespace(logprob=self.logprob, rank=1)} for i in ids]
        logprobs = entries if sampling_params.logprobs is not None else None
        output = {"token_ids": ids, "text": said, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}
        output = SimpleNamespace(**{**output, **self.changes})
        return SimpleNamespace(prompt_token_ids=list(prompt_token_ids), outputs=[output], num_cached_tokens=0)


class AsyncLLM(LLM):
    """vLLM's own engine, as OpenRLHF 0.8.7 to 0.9.0 handed it over."""

    async def generate(self, prompt, sampling_params, request_id):
        self.requests.append((prompt["prompt_token_ids"], sampling_params, request_id))
        whole = self.output(prompt["prompt_token_ids"], sampling_params)
        half = SimpleNamespace(**vars(whole.outputs[0]))
        half.token_ids, half.finish_reason = half.token_ids[:1], None
        yield SimpleNamespace(prompt_token_ids=whole.prompt_token_ids, outputs=[half])
        yield whole


class Env(AgentInstance):
    """Answers with the replies in order, the last one again and again."""

    def __init__(self, *replies, prompt=None):
        self.replies, self.prompt, self.seen = replies, prompt, []

    async def reset(self, states):
        return states if self.prompt is None else {"observation": self.prompt}

    async def step(self, states):
        self.seen.append(states)
        answer = self.replies[min(len(self.seen), len(self.replies)) - 1]
        return answer(states) if callable(answer) else answer


def reply(feedback="", *, rewards=0.0, done=False, **more):
    """OpenRLHF's step result."""
    return {"rewards": rewards, "environment_feedback": feedback, "done": done, **more}


DONE = StepResult(reward=1.0, terminated=True)


def executor(*replies, prompt=None, **attributes):
    """An executor whose agents answer with these, once; its `agents` are those it made."""
    agents = []

    class Agent(Env):
        def __init__(self):
            super().__init__(*replies, prompt=prompt)
            agents.append(self)

    made = type("AgentExecutor", (AgentExecutor,), {"agent_cls": Agent, "max_retries": 0, **attributes})()
    made.agents = agents
    return made


async def execute(made, llm, *, params=None, max_length=200, prompt="prompt", label="l", tokenizer=None):
    """Call `execute` as OpenRLHF 0.10.0 to 0.11.2 do."""
    return await made.execute(
        prompt=prompt, label=label, sampling_params=params if params is not None else Params(),
        max_length=max_length, hf_tokenizer=tokenizer or CharTokenizer(), llm_engine=llm, images=None,
    )  # fmt: skip


async def siblings(made, llm, num=4, *, params=None, **options):
    """All samples of one prompt, as `generate_responses` makes them: one object for the sampling of all."""
    params = params if params is not None else Params()
    return await asyncio.gather(*(execute(made, llm, params=params, **options) for _ in range(num)))
