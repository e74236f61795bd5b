# ruff: noqa
# A loop of its own in the form of OpenRLHF 0.8.9 to 0.9.0: the base's helper for a generation, a queue for the result.
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        pass

    async def step(self, states, **kwargs):
        raise NotImplementedError


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        tokens = self.hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        sampling_params.max_tokens = self.max_length - len(tokens)
        request_output = await self.generate(tokens, sampling_params)
        output = request_output.outputs[0]
        start = len(tokens)
        tokens = tokens + output.token_ids
        await self.result_queue.put(
            {
                "prompt": prompt,
                "label": label,
                "observation_tokens": tokens,
                "action_ranges": [(start, len(tokens))],
                "rollout_log_probs": [0.0] * start + [list(entry.values())[0].logprob for entry in output.logprobs],
                "reward": float(label in output.text),
                "scores": float(label in output.text),
                "extra_logs": {"calls": 1},
            }
        )
