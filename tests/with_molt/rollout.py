"""Rollouts by Molt's own runner actor and generator, against a served vLLM: a JSON line per Experience. Run by a test.

Molt's router, which only spreads the requests over engines, is left out: the one engine has the same routes.
"""

import json
import os
import sys
from collections import defaultdict
from types import SimpleNamespace

import ray
import torch
from molt.datasets.prompts_dataset import preprocess_data
from molt.trainer.algorithm.experience import make_experience_batch, split_experience_batch
from molt.trainer.rollout.router import AgentRunnerActor
from molt.trainer.rollout.samples_generator import SamplesGenerator
from transformers import AutoTokenizer

FIELDS = ("sequences", "action_mask", "rollout_log_probs", "rewards", "scores", "truncated")


def said(experience):
    values = {name: getattr(experience, name) for name in FIELDS}
    listed = {name: None if value is None else value.tolist() for name, value in values.items()}
    info = {name: value.flatten().tolist() for name, value in experience.info.items()}
    return {**listed, "info": info, "labels": experience.labels, "groups": experience.group_ids}


def main(model, url, agent_path, rows, max_len, max_new_tokens):
    ray.init("local", num_cpus=3, include_dashboard=False, object_store_memory=128 * 2**20)
    tokenizer = AutoTokenizer.from_pretrained(model)
    runners = [AgentRunnerActor.remote(agent_path, url, model_path=model)]
    rollout = SimpleNamespace(batch_size=len(rows), n_samples_per_prompt=2, vllm_generate_batch_size=len(rows))
    advantage = SimpleNamespace(is_correction_level="token")
    algo = SimpleNamespace(dynamic_filtering_enable=False, advantage=advantage)
    world = {"actor": SimpleNamespace(num_nodes=1, num_gpus_per_node=1), "fsdp": SimpleNamespace(cp_size=1, tp_size=1)}
    args = SimpleNamespace(rollout=rollout, algo=algo, **world)
    loader = []
    for row in rows:  # as Molt's data set gives them to a runner that renders its prompts itself
        prompt, label = preprocess_data(row, "prompt", "label", tokenizer.apply_chat_template, prerender=False)
        loader.append((["data"], [prompt], [label], [None], [None]))
    generator = SamplesGenerator(SimpleNamespace(args=args), loader, None, tokenizer, runners)
    samples, metrics, *_ = generator.generate_samples(
        max_len=max_len, max_new_tokens=max_new_tokens, temperature=1.0, n_samples_per_prompt=2
    )
    samples = [sample.reload() for sample in samples]
    batch = make_experience_batch([item for sample in samples for item in split_experience_batch(sample)])
    assert batch.rewards.dtype == torch.float32
    for sample in samples:
        print("EXPERIENCE " + json.dumps(said(sample)))
    print("METRICS " + json.dumps(defaultdict(float, metrics)), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
    ray.shutdown()
    os._exit(0)
