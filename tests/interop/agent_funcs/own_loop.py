# ruff: noqa
# A loop of its own in the form of OpenRLHF 0.10.0 to 0.11.2: vLLM's objects in, the response dict out.
from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = hf_tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        log_probs = [0.0] * len(tokens) if sampling_params.logprobs is not None else None
        ranges, text = [], ""
        for _ in range(2):
            sampling_params.max_tokens = max_length - len(tokens)
            sampling_params.temperature = 0.5
            sampling_params.stop = ["STOP"]
            request_output = await llm_engine.generate(tokens, deepcopy(sampling_params), multi_modal_data=None)
            output = request_output.outputs[0]
            assert request_output.prompt_token_ids == tokens and output.finish_reason == "stop"
            text += output.text
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = tokens + output.token_ids
            for token, entry in zip(output.token_ids, output.logprobs):
                log_probs.append(entry[token].logprob)
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": log_probs,
            "reward": float(label in text),
            "scores": float(label in text),
            "truncated": False,
            "extra_logs": {"calls": 2},
        }
