"""Tokens per second of HFEngine, VLLMEngine and transformers' continuous batching, on one model in one run.

    python benchmarks/engines.py --concurrency 1 8 64 --repeats 3

Without `--model`, a Qwen2 of 4 layers, 128 wide, is created. The engines alternate, so that other load affects all of
them equally, and the best repeat counts. Compare on equal cores: OMP_NUM_THREADS=1 gives each engine
one thread; without it vLLM's CPU build takes all cores and HFEngine one, for so small a model. `--shared-turns` adds a
multi-turn round: each request's prompt extends its last one, as an episode's does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from agentenv.core.engine import Engine
from agentenv.core.types import Completion, SamplingParams

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class TransformersBatching:
    """transformers' `generate_batch` behind the same interface, with its limits: greedy, no stop strings, no seeds."""

    def __init__(self, model: str) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        # Its defaults, which size the cache by the machine's memory, are twenty times slower on a CPU.
        self._batching = transformers.ContinuousBatchingConfig(
            page_size=32, num_blocks=1024, max_batch_tokens=1024, max_requests_per_batch=64, return_logprobs=True
        )
        self._config = transformers.GenerationConfig

    def sample(self, prompts: list[list[int]], num_tokens: int) -> int:
        """Sample `num_tokens` tokens after each prompt, and return their number."""
        config = self._config(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = self._model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=self._batching, progress_bar=False
        )
        return sum(len(output.generated_tokens) for output in outputs.values())


def make_prompts(num: int, length: int, salt: int) -> list[list[int]]:
    return [[40 + (salt * 7919 + i * 31 + j * j) % 250 for j in range(length)] for i in range(num)]


async def sample_all(engine: Engine, prompts: list[list[int]], args: argparse.Namespace, name: str) -> list[Completion]:
    # No seeds: vLLM 0.32 on a CPU dies when the prompt of a seeded request is split over two of its steps.
    kind = SamplingParams(max_tokens=args.tokens, min_tokens=args.tokens)
    asked = [engine.generate(prompt, kind, request_id=f"{name}-{i}/0") for i, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*asked))


async def time_round(engine: Any, prompts: list[list[int]], args: argparse.Namespace, name: str) -> float:
    """Return the tokens per second of one round."""
    start = time.perf_counter()
    if isinstance(engine, TransformersBatching):
        num = await asyncio.to_thread(engine.sample, prompts, args.tokens)
    else:
        num = sum(len(c.token_ids) for c in await sample_all(engine, prompts, args, name))
    return num / (time.perf_counter() - start)


async def time_turns(engine: Engine, args: argparse.Namespace, num_turns: int = 4) -> tuple[float, float]:
    """Return the tokens per second of multi-turn episodes, and the cached share of their prompts."""

    async def episode(index: int, prompt: list[int]) -> tuple[int, int, int]:
        num_sampled = num_prompt = num_cached = 0
        kind = SamplingParams(max_tokens=args.tokens // 4, min_tokens=args.tokens // 4)
        for turn in range(num_turns):
            completion = await engine.generate(prompt, kind, request_id=f"episode-{index}/{turn}")
            num_sampled += len(completion.token_ids)
            num_prompt += len(prompt)
            num_cached += completion.num_cached_tokens
            prompt = [*prompt, *completion.token_ids, *range(60, 80)]
        return num_sampled, num_prompt, num_cached

    start = time.perf_counter()
    prompts = make_prompts(max(args.concurrency), 4 * args.prompt, 99)
    counts = await asyncio.gather(*(episode(i, p) for i, p in enumerate(prompts)))
    num_sampled, num_prompt, num_cached = map(sum, zip(*counts, strict=True))
    return num_sampled / (time.perf_counter() - start), num_cached / num_prompt


async def make_engine(name: str, model: str) -> Any:
    if name == "transformers":
        return TransformersBatching(model)
    if name == "hf":
        from agentenv.engines.hf.engine import HFEngine

        return HFEngine(model, max_length=2048)
    from agentenv.engines.vllm.local import VLLMEngine

    engine = VLLMEngine(model, dtype="float32", max_model_len=2048, max_num_seqs=64)
    await engine.start()
    return engine


async def run(args: argparse.Namespace, model: str) -> None:
    engines = {name: await make_engine(name, model) for name in args.engines}
    best: dict[tuple[str, int], float] = defaultdict(float)
    try:
        for name, engine in engines.items():
            await time_round(engine, make_prompts(2, args.prompt, 0), argparse.Namespace(tokens=8), f"{name}-warm")
        for repeat in range(1, args.repeats + 1):
            for concurrency in args.concurrency:
                for name, engine in engines.items():
                    prompts = make_prompts(concurrency, args.prompt, repeat * 1000 + concurrency)
                    speed = await time_round(engine, prompts, args, f"{name}-{repeat}-{concurrency}")
                    best[name, concurrency] = max(best[name, concurrency], speed)
        report(args, best)
        if args.shared_turns:
            for name, engine in engines.items():
                if name != "transformers":
                    speed, cached = await time_turns(engine, args)
                    print(f"turns: {name:>12} {speed:9.0f} tokens/s, {cached:.0%} of the prompt tokens cached")
    finally:
        for engine in engines.values():
            if hasattr(engine, "close"):
                await engine.close()


def report(args: argparse.Namespace, best: dict[tuple[str, int], float]) -> None:
    print(f"tokens/s, best of {args.repeats}; prompts of {args.prompt}, actions of {args.tokens} tokens")
    print("requests" + "".join(f"{name:>14}" for name in args.engines) + "   hf/vllm")
    for concurrency in args.concurrency:
        speeds = [best[name, concurrency] for name in args.engines]
        ratio = (
            best["hf", concurrency] / best["vllm", concurrency] if {"hf", "vllm"} <= set(args.engines) else float("nan")
        )
        print(f"{concurrency:8}" + "".join(f"{speed:14.0f}" for speed in speeds) + f"{ratio:10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; created if omitted")
    parser.add_argument("--engines", nargs="+", choices=["hf", "vllm", "transformers"], default=["hf", "vllm"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an action")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shared-turns", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            sys.path.insert(0, str(Path(__file__).parents[1]))
            from tests.models import make_tiny_qwen2

            args.model = str(make_tiny_qwen2(Path(folder) / "qwen2", vocab_size=2048, layers=4, width=128))
        asyncio.run(run(args, args.model))


if __name__ == "__main__":
    main()
