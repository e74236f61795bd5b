"""agent_funcs/math_retry.py as Molt loads it, with a record of what the router gave and what the environment paid."""

from types import MappingProxyType

from tests.with_openrlhf.files.recorded_math_retry import MODULE, Recorded, note


class Recorder:
    def __init__(self, llm_engine):
        self.llm_engine = llm_engine

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None, session_id=None):
        out, stale = await self.llm_engine.generate(prompt_token_ids, sampling_params, multi_modal_data, session_id)
        said = out.outputs[0]
        logprobs = [entry[i].logprob for i, entry in zip(said.token_ids, said.logprobs, strict=True)]
        facts = {"session": session_id, "stale": stale, "cut": said.finish_reason == "length"}
        note(prompt=prompt_token_ids, sampled=said.token_ids, logprobs=logprobs, **facts)
        return out, stale


class AgentRunner(MODULE.AgentRunner):
    agent_cls = Recorded
    agent_kwargs = MappingProxyType({"wrong_reward": 0.125})

    async def execute(self, *, llm_engine, **kwargs):
        return await super().execute(llm_engine=Recorder(llm_engine), **kwargs)
