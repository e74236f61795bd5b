"""Rollouts by OpenRLHF's own classes on vLLM's CPU build: prints one JSON line per Experience. Run by a test."""

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


def said(experience):
    values = {name: getattr(experience, name) for name in FIELDS}
    listed = {name: None if value is None else value.tolist() for name, value in values.items()}
    info = {name: value.flatten().tolist() for name, value in experience.info.items()}
    return {**listed, "info": info, "prompts": experience.prompts, "labels": experience.labels}


def main(model, agent_func, rows, max_len, max_new_tokens, level):
    started = time.perf_counter()
    ray.init(num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=True)
    engines = create_vllm_engines(
        1, 1, model, 7, False, True, True, 1024,
        logprobs_mode="processed_logprobs", agent_func_path=agent_func, gpu_memory_utilization=0.1,
    )  # fmt: skip
    rollout = SimpleNamespace(batch_size=len(rows), n_samples_per_prompt=2, vllm_generate_batch_size=len(rows))
    algo = SimpleNamespace(dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level=level))
    args = SimpleNamespace(rollout=rollout, algo=algo, vllm=SimpleNamespace(enable_sleep=False))
    loader = [(["data"], [row["prompt"]], [row["label"]], [None]) for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = SamplesGenerator(SimpleNamespace(args=args), loader, None, tokenizer, engines)
    samples, *_ = generator.generate_samples(max_len=max_len, max_new_tokens=max_new_tokens, temperature=1.0)
    for sample in samples:
        print("EXPERIENCE " + json.dumps(said(sample)), flush=True)
    items = [item for sample in samples for item in split_experience_batch(sample)]
    batch = make_experience_batch(items)
    assert batch.sequences.shape[0] == len(samples)
    assert batch.rewards.dtype == torch.float32
    print(f"SECONDS {time.perf_counter() - started:.1f}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
    os._exit(0)
