"""agent_funcs/math_retry.py as Molt loads it, with a record of what the router gave and what the environment paid."""

import importlib.util
import json
import os
from pathlib import Path
from types import MappingProxyType

from agentenv_envs.math_retry import MathRetry

_FILE = Path(__file__).parents[2] / "agent_funcs/math_retry.py"
_SPEC = importlib.util.spec_from_file_location("math_retry_agent_file", _FILE)
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)


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

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None, session_id=None):
        out, stale = await self.llm_engine.generate(prompt_token_ids, sampling_params, multi_modal_data, session_id)
        said = out.outputs[0]
        logprobs = [entry[i].logprob for i, entry in zip(said.token_ids, said.logprobs, strict=True)]
        note(prompt=prompt_token_ids, sampled=said.token_ids, logprobs=logprobs, session=session_id, stale=stale)
        return out, stale


class AgentRunner(_MODULE.AgentRunner):
    agent_cls = Recorded
    agent_kwargs = MappingProxyType({"wrong_reward": 0.125})

    async def execute(self, *, llm_engine, **kwargs):
        return await super().execute(llm_engine=Recorder(llm_engine), **kwargs)
