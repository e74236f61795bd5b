"""Rollouts by OpenRLHF's own classes on vLLM's CPU build: prints one JSON line per Experience. Run by a test.

Ray and vLLM start once and serve every batch: that is nearly all of the time.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import make_experience_batch, split_experience_batch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
from transformers import AutoTokenizer

FIELDS = ("sequences", "attention_mask", "action_mask", "rollout_log_probs", "rewards", "scores", "truncated")
STARTED = time.perf_counter()


def tell(what):
    print(f"SECONDS {time.perf_counter() - STARTED:.1f} {what}", file=sys.stderr, flush=True)


def said(experience):
    values = {name: getattr(experience, name) for name in FIELDS}
    listed = {name: None if value is None else value.tolist() for name, value in values.items()}
    info = {name: value.flatten().tolist() for name, value in experience.info.items()}
    return {**listed, "info": info, "prompts": experience.prompts, "labels": experience.labels}


def sampled(engines, tokenizer, *, rows, max_len, max_new_tokens, level):
    """The samples of one rollout batch, one Experience each."""
    rollout = SimpleNamespace(batch_size=len(rows), n_samples_per_prompt=2, vllm_generate_batch_size=len(rows))
    algo = SimpleNamespace(dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level=level))
    args = SimpleNamespace(rollout=rollout, algo=algo, vllm=SimpleNamespace(enable_sleep=False))
    loader = [(["data"], [row["prompt"]], [row["label"]], [None]) for row in rows]
    generator = SamplesGenerator(SimpleNamespace(args=args), loader, None, tokenizer, engines)
    samples, *_ = generator.generate_samples(max_len=max_len, max_new_tokens=max_new_tokens, temperature=1.0)
    items = [item for sample in samples for item in split_experience_batch(sample)]
    batch = make_experience_batch(items)
    assert batch.sequences.shape[0] == len(samples)
    assert batch.rewards.dtype == torch.float32
    return samples


def main(model, agent_func, batches):
    # A Ray of its own: one that runs on this machine already is somebody else's.
    ray.init("local", num_cpus=3, num_gpus=1, include_dashboard=False, object_store_memory=128 * 2**20)
    tell("Ray")
    engines = create_vllm_engines(
        1, 1, model, 7, False, True, True, 1024,
        logprobs_mode="processed_logprobs", agent_func_path=agent_func, gpu_memory_utilization=0.1,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name, batch in batches.items():
        for sample in sampled(engines, tokenizer, **batch):
            print("EXPERIENCE " + json.dumps({"batch": name, **said(sample)}), flush=True)
        tell(name)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
    ray.shutdown()
    os._exit(0)
