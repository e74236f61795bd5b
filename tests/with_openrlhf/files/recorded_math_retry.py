"""agent_funcs/math_retry.py with a record beside it of what vLLM sampled and what the environment paid."""

import importlib.util
import json
import os
from pathlib import Path
from types import MappingProxyType

from agentenv_envs.math_retry import MathRetry

_FILE = Path(__file__).parents[3] / "agent_funcs/math_retry.py"
_SPEC = importlib.util.spec_from_file_location("math_retry_agent_func", _FILE)
MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(MODULE)


def note(**said):
    with Path(os.environ["RECORD"]).open("a") as file:
        file.write(json.dumps(said) + "\n")


class Recorded(MathRetry):
    async def step(self, states):
        result = await super().step(states)
        note(paid=result.reward, score=result.score, action_ids=states["action_ids"], turn=states["turn_index"])
        return result


class Recorder:
    def __init__(self, llm_engine):
        self.llm_engine = llm_engine

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        assert type(prompt_token_ids) is list
        before = repr(sampling_params)
        out = await self.llm_engine.generate(prompt_token_ids, sampling_params, multi_modal_data)
        assert repr(sampling_params) == before
        output = out.outputs[0]
        ids = list(output.token_ids)
        entries = output.logprobs
        logprobs = entries and [entry[i].logprob for i, entry in zip(ids, entries, strict=True)]
        note(prompt=prompt_token_ids, sampled=ids, logprobs=logprobs, max_tokens=sampling_params.max_tokens)
        return out


class AgentExecutor(MODULE.AgentExecutor):
    agent_cls = Recorded
    agent_kwargs = MappingProxyType({"wrong_reward": 0.125})

    async def execute(self, *, llm_engine, sampling_params, **kwargs):
        asked = repr(sampling_params)
        response = await super().execute(llm_engine=Recorder(llm_engine), sampling_params=sampling_params, **kwargs)
        assert repr(sampling_params) == asked
        return response
