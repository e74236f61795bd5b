"""Milliseconds that new weights take to reach a running vLLM, against a checkpoint and a fresh engine, in one process.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py

Models: the shipped tiny-math, and a Qwen2 of 100 million random weights, both in float32. The engine
is vLLM in this process, or in a Ray actor. Ways:

- `update`: `engine.update_weights(state_dict, version)`, the median of 10, with 0 and with 32 requests in flight;
  `pause` is the part of it from the call that stops sampling to the one that resumes it (in this process only).
- `checkpoint`: what is left where an engine cannot take weights: `save_pretrained`, then a new engine that loads them,
  up to its first token; the old one is closed before, outside the clock. Once.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from common import machine
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from agentenv.core.types import SamplingParams
from agentenv.engines.models import resolve_model
from agentenv.engines.opening import open_engine
from agentenv.engines.ray_actor import RayConfig

LONG = SamplingParams(max_tokens=900, min_tokens=900)
ARGS = {"max_model_len": 1024, "enforce_eager": True}
TINY = Path(resolve_model("tiny-math"))


def make_model(folder: Path) -> Path:
    """Create a Qwen2 of 100 million random weights, with the tokenizer of tiny-math."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(TINY, folder)
    return folder


def copy_tokenizer(path: Path, folder: str | Path) -> None:
    """Copy the tokenizer, which a model's `save_pretrained` leaves out."""
    for file in path.glob("*token*"):
        shutil.copy(file, folder)


@asynccontextmanager
async def engine_of(path: Path, where: str) -> AsyncIterator[Any]:
    """Yield vLLM, in this process or in a Ray actor."""
    name, ray = ("ray", RayConfig(backend="vllm_local")) if where == "Ray actor" else ("vllm_local", None)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    async with open_engine(
        name, str(path), tokenizer, device="cpu", dtype="float32", args=dict(ARGS), ray=ray
    ) as engine:
        yield engine


class Pauses:
    """Times how long vLLM is paused in each update, with a clock around two of its calls."""

    def __init__(self, llm: Any) -> None:
        self.seconds: list[float] = []
        pause, resume, since = llm.pause_generation, llm.resume_generation, 0.0

        async def timed_pause(**options: Any) -> None:
            nonlocal since
            since = time.perf_counter()
            await pause(**options)

        async def timed_resume() -> None:
            self.seconds.append(time.perf_counter() - since)
            await resume()

        llm.pause_generation, llm.resume_generation = timed_pause, timed_resume


async def updates(engine: Any, weights: dict[str, torch.Tensor], num_in_flight: int, rounds: int) -> list[float]:
    """Return the seconds of each update, after an uncounted first one that sets up the transfer."""
    seconds = []
    for count in range(1 + rounds):
        asked = [engine.generate([5, 6, 7 + i], LONG, request_id=f"{count}.{i}/0") for i in range(num_in_flight)]
        tasks = [asyncio.create_task(each) for each in asked]
        await asyncio.sleep(0.5 if tasks else 0.0)
        started = time.perf_counter()
        await engine.update_weights(weights.items(), engine.policy_version + 1)
        seconds.append(time.perf_counter() - started)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seconds[1:]


async def checkpoint(path: Path, model: Any, where: str) -> float:
    """Return the seconds to save the model and get its first token from a new engine."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        copy_tokenizer(path, folder)
        async with engine_of(Path(folder), where) as engine:
            await engine.generate([5, 6, 7], SamplingParams(max_tokens=1), request_id="first/0")
            return time.perf_counter() - started


async def measure(name: str, path: Path, where: str, rounds: int) -> None:
    """Print two rows of the table."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = model.state_dict()
    megabytes = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    found = {}
    async with engine_of(path, where) as engine:
        pauses = Pauses(engine._llm) if where == "this process" else None
        for num_in_flight in (0, 32):
            found[num_in_flight] = statistics.median(await updates(engine, weights, num_in_flight, rounds))
            if pauses:
                found[f"pause {num_in_flight}"] = statistics.median(pauses.seconds[-rounds:])
    naive = await checkpoint(path, model, where)
    for num_in_flight in (0, 32):
        pause = f"{1e3 * found[f'pause {num_in_flight}']:,.0f}" if pauses else "-"
        print(
            f"| {name}, {megabytes:,.0f} MB | {where} | {num_in_flight} | {1e3 * found[num_in_flight]:,.0f} | {pause} "
            f"| {1e3 * naive:,.0f} | {naive / found[num_in_flight]:,.0f} |",
            flush=True,
        )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=["tiny-math", "random"], choices=["tiny-math", "random"])
    parser.add_argument("--where", nargs="+", default=["this process", "Ray actor"])
    asked = parser.parse_args()
    print(f"{machine()}\n")
    print("| model | engine in | in flight | update ms | pause ms | checkpoint ms | checkpoint / update |")
    print("|---|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        paths = {"tiny-math": TINY}
        if "random" in asked.models:
            paths["random"] = make_model(Path(folder))
        for name in asked.models:
            for where in asked.where:
                asyncio.run(measure(name, paths[name], where, asked.rounds))


if __name__ == "__main__":
    main()
