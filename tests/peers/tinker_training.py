"""tinker-cookbook's own `train.main` on our episodes against SkyRL's server on the CPU; prints its metrics as JSON.

A small Qwen3 with random weights is trained, because SkyRL has no Qwen2. Usage: tinker_training.py STEPS
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

os.environ["TINKER_API_KEY"] = "tml-none"
os.environ["TINKER_TELEMETRY"] = "0"

import torch
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollout_strategy import MinViableGroup
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentenv import Limits, StepResult
from agentenv.interop.tinker import EnvDatasetBuilder
from agentenv_envs.math_retry import MathRetry
from tests.peers.where import ROOT
from tests.ports import held_port

HERE = Path.cwd()
MODEL = str(HERE / "tiny-qwen3")


class Vowels(MathRetry):
    """Math_retry, which pays for the share of vowels in each of two actions: random weights earn different rewards."""

    async def reset(self, states):
        self.turn = 0
        return await super().reset(states)

    async def step(self, states):
        self.turn += 1
        text = states["action_text"]
        share = sum(each in "aeiou" for each in text) / max(1, len(text))
        return StepResult([{"role": "user", "content": "More."}], reward=share, terminated=self.turn == 2)


def make_model():
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "agentenv/_assets/tiny-math")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def wait_for(url, server):
    while True:
        assert server.poll() is None, (HERE / "server.txt").read_text()[-4000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)


def main():
    make_model()
    with held_port() as port:
        train_at(port)


def train_at(port):
    flags = {
        "base_model": MODEL, "backend": "jax", "port": port, "checkpoints_base": HERE / "checkpoints",
        "database_url": f"sqlite:///{HERE / 'server.db'}",
        "backend_config": json.dumps({"max_lora_adapters": 2, "max_lora_rank": 8}),
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    with (HERE / "server.txt").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/peers/skyrl_server.py"), "api", *words], stdout=log, stderr=log,
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server)
        builder = EnvDatasetBuilder(
            Vowels, "word_problems_train", MODEL, group_size=4, batch_size=2, limits=Limits(max_length=128)
        )
        config = train.Config(
            learning_rate=1e-2, dataset_builder=builder, model_name=MODEL, recipe_name="agentenv", max_tokens=8,
            log_path=str(HERE / "log"), eval_every=0, save_every=0, lora_rank=8, base_url=url, num_groups_to_log=0,
            ttl_seconds=None, max_steps=int(sys.argv[1]), rollout_error_tolerance=MinViableGroup(),
        )  # fmt: skip
        asyncio.run(train.main(config))
    finally:
        server.stdin.close()
        server.wait()
    metrics = [json.loads(line) for line in (HERE / "log/metrics.jsonl").read_text().splitlines()]
    print("\n" + json.dumps(metrics))


main()
