"""What agentenv does on one GPU: one command of at most ten minutes, one JSON file and one table.

    python benchmarks/gpu.py --out gpu

It needs torch, transformers and peft; with vLLM installed it also measures vLLM. Nothing is downloaded: the model is a
Qwen2 of random weights (`--size`), with the tokenizer of tiny-math. Each part runs in its own process with a time
limit. If a part fails, the end of its log is reported, and the others still run:

- `card`: bf16 matrix products of 8192 x 8192, the rate that `of the card` below refers to.
- `engine`: tokens per second and peak memory of the engine hf in bf16.
- `learner`: tokens per second and peak memory of a train step in bf16, plain and packed, with gradient checkpointing,
  with LoRA, and with FSDP2 on one rank. `of the card` counts 6 operations per weight and token (4 with LoRA, which has
  no gradients of the weights), without attention and recomputation.
- `agreement`: the difference between the log-probabilities of the engine hf and of the learner, both in bf16.
- `weights`: a model's weights through shared memory into the engine, and through CUDA IPC into another process.
- `training`: the training of `make train-demo`, with its score on held-out tasks before and after.
- `vllm`: the speed of vLLM, the agreement with the learner, and weights through CUDA IPC.

`--device cpu --size tiny` tries the script where there is no GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import train_demo
from common import ROOT, machine

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.models import resolve_model
from agentenv.training.logs.journal import read_metrics

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing_samples": True},
    "packed, gradient checkpointing": {"packing_samples": True, "gradient_checkpointing": True},
    "packed, LoRA of rank 16": {"packing_samples": True, "lora_rank": 16},
    "packed, FSDP2 on one rank": {"packing_samples": True},
}
VOCAB_SIZE = 32_000
Numbers = dict[str, float]
"""The figures of a part, by the text of their rows."""


def make_model(folder: Path, size: str, device: str) -> None:
    """Write a Qwen2 of random weights in bf16 into the folder, with the tokenizer of tiny-math."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **SIZES[size],
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.04,  # wide enough that some tokens are likely
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in Path(resolve_model("tiny-math")).glob("*token*"):
        shutil.copy(file, folder)


class Bench:
    """The parts, each a method that returns its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.is_tiny = args, args.device, args.size == "tiny"
        self.num_tokens, self.num_prompt = (16, 32) if self.is_tiny else (256, 512)
        self.num_episodes = 8 if self.is_tiny else 32

    def card(self) -> Numbers:
        """Return the rate of bf16 matrix products."""
        side, repeats = (256, 2) if self.is_tiny else (8192, 50)
        left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        for _ in range(3):
            left @ right
        seconds = self.seconds(lambda: [left @ right for _ in range(repeats)])
        return {"bf16 matrix products, TFLOP/s": 2 * side**3 * repeats / seconds / 1e12}

    def engine(self) -> Numbers:
        """Return the speed of the engine hf."""
        return asyncio.run(self.speeds(self.hf(), "hf"))

    def learner(self) -> Numbers:
        """Return the speed of a train step with each of `VARIANTS`, on random episodes of one batch."""
        from agentenv.training.algorithm.batch import build

        lengths = [16, 24] if self.is_tiny else [256, 512, 1024, 2048]
        batch = build(
            [self.random_episode(index, lengths[index // 2 % len(lengths)]) for index in range(self.num_episodes)]
        )
        num_tokens = sum(map(len, batch.sequences))
        found: Numbers = {}
        for name, flags in VARIANTS.items():
            learner = self.make_learner(flags, sharded="FSDP2" in name)
            num_embedded = VOCAB_SIZE * SIZES[self.args.size]["hidden_size"]  # they multiply nothing
            num_weights = sum(p.numel() for p in learner.policy.model.parameters()) - num_embedded
            learner.train_step(batch)
            self.reset_peak()
            seconds = statistics.median(self.seconds(functools.partial(learner.train_step, batch)) for _ in range(3))
            found[f"{name}: tokens/s"] = num_tokens / seconds
            found[f"{name}: TFLOP/s"] = (4 if "LoRA" in name else 6) * num_weights * num_tokens / seconds / 1e12
            found |= self.peak(name)
            print(json.dumps(found), flush=True)  # kept if a later variant fails
            del learner
            self.empty()
        return found

    def agreement(self) -> Numbers:
        """Return the difference between the log-probabilities of the engine hf and of the learner."""
        return asyncio.run(self.difference(self.hf()))

    def weights(self) -> Numbers:
        """Return the time of an update through shared memory, and that of CUDA IPC."""
        found = {"shared memory, into the engine hf: s": asyncio.run(self.update(self.hf(), "shm"))}
        if self.device != "cpu":
            found["CUDA IPC, into another process: s"] = share_by_ipc(self.device)
        return found

    def training(self) -> Numbers:
        """Return the score of tiny-math on held-out tasks before and after a training."""
        with tempfile.TemporaryDirectory() as folder:
            command = train_demo.command("math", "hf", 0, Path(folder))
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "agentenv.cli", *command], check=True)
            seconds = time.perf_counter() - started
            rows = read_metrics(Path(folder, "train"))
        scores = [row[train_demo.KEYS["math"]] for row in rows if train_demo.KEYS["math"] in row]
        return {"score before": scores[0], "score after": scores[-1], "start included: s": seconds}

    def vllm(self) -> Numbers:
        """Return the speed of vLLM, its agreement with the learner, and the time of an update through CUDA IPC."""
        from agentenv.engines.vllm.local import VLLMEngine

        async def engine() -> VLLMEngine:
            made = VLLMEngine(
                self.args.model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, gpu_memory_utilization=0.4
            )
            await made.start()
            return made

        async def measure() -> Numbers:
            found = await self.speeds(await engine(), "vLLM")
            found |= await self.difference(await engine())
            if self.device != "cpu":
                found["CUDA IPC, into vLLM: s"] = await self.update(await engine(), "ipc")
            return found

        return asyncio.run(measure())

    # --- shared by the parts ---

    def hf(self) -> Any:
        """Return the engine hf in bf16."""
        from agentenv.engines.hf.engine import HFEngine

        return HFEngine(self.args.model, device=self.device, dtype="bfloat16", max_length=4096)

    async def speeds(self, engine: Any, name: str) -> Numbers:
        """Return an engine's tokens per second at several numbers of requests; close it."""
        found: Numbers = {}
        try:
            await self.sample(engine, 2, 8)
            for num in (1, 8, 64):
                self.reset_peak()
                started = time.perf_counter()
                await self.sample(engine, num, self.num_tokens)
                found[f"{name}, {num} at once: tokens/s"] = num * self.num_tokens / (time.perf_counter() - started)
            if name == "hf":  # vLLM takes the share of memory that it is told to
                found |= self.peak("hf, 64 at once")
        finally:
            await engine.close()
        return found

    async def difference(self, engine: Any) -> Numbers:
        """Return the mean difference between an engine's log-probabilities and the learner's; close the engine."""
        from agentenv.training.algorithm.batch import build

        try:
            completions = await self.sample(engine, 32, self.num_tokens)
        finally:
            await engine.close()
        self.empty()
        learner = self.make_learner({"packing_samples": True})
        episodes = [episode_of(self.prompt(index), completion, index) for index, completion in enumerate(completions)]
        metrics = learner.train_step(build(episodes))
        return {"log-probabilities, mean difference from the learner's": metrics["logprob_diff"]}

    async def update(self, engine: Any, transfer: str) -> float:
        """Return the seconds in which the learner's weights reach an engine; close the engine."""
        from agentenv.engines.weights import WeightSender

        learner, sender = self.make_learner({"packing_samples": True}), WeightSender(transfer)
        try:
            started = time.perf_counter()
            await sender.send(learner.weights(), [engine], lambda ask: ask(engine), 1)
            return time.perf_counter() - started
        finally:
            sender.close()
            await engine.close()

    async def sample(self, engine: Any, num: int, num_tokens: int) -> Sequence[Completion]:
        """Sample so many actions of so many tokens at once."""
        params = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens)
        return await asyncio.gather(
            *(engine.generate(self.prompt(index), params, request_id=f"{index}/0") for index in range(num))
        )

    def prompt(self, index: int) -> list[int]:
        """Return a prompt that no other index has."""
        return torch.randint(300, (self.num_prompt,), generator=torch.Generator().manual_seed(index)).tolist()

    def random_episode(self, index: int, length: int) -> Trajectory:
        """Return an episode with a prompt and an action of so many random tokens in sum."""
        ids = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(index)).tolist()
        prompt, action = ids[: length // 4], ids[length // 4 :]
        return episode_of(prompt, Completion(tuple(action), logprobs=(-10.0,) * len(action)), index)

    def make_learner(self, flags: Mapping[str, Any], *, sharded: bool = False) -> Any:
        """Return a learner in bf16."""
        from agentenv.training.config import TrainConfig
        from agentenv.training.learner.learner import Learner

        config = TrainConfig.from_flags(
            env="math_retry", param_dtype="bf16", actor_learning_rate=1e-6, use_dynamic_batch=True,
            train_max_tokens_per_gpu=64 if self.is_tiny else 16_384, train_batch_size=self.num_episodes, **flags,
        )  # fmt: skip
        ranks = one_rank(self.device) if sharded else None
        return Learner(config, self.args.model, num_train_steps=10, device=self.device, ranks=ranks)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that the work takes, the GPU's included."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def empty(self) -> None:
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()

    def peak(self, name: str) -> Numbers:
        """Return the most memory that torch allocated; nothing on a CPU."""
        if self.device == "cpu":
            return {}
        return {f"{name}: peak GiB": torch.cuda.max_memory_allocated() / 2**30}


def episode_of(prompt: list[int], completion: Completion, index: int) -> Trajectory:
    """Return a finished episode of one action, in a group of eight, with a reward that differs within it."""
    made = Trajectory(Task("?"), 4096, episode_id=str(index), group_id=str(index // 8))
    made.append_observation(prompt)
    made.append_turn(completion, "")
    made.set_result(StepResult(reward=float(index % 2)))
    made.finish(StopReason.TERMINATED)
    return made


def one_rank(device: str) -> Any:
    """Return a group of this process alone, over which FSDP2 shards as over several."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from agentenv.training.learner.sharding import Ranks

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as in a training
    group = dist.new_group(backend="gloo" if device == "cpu" else "nccl")
    return Ranks(0, 1, DeviceMesh.from_group(group, torch.device(device).type))


def share_by_ipc(device: str) -> float:
    """Return the seconds in which another process opens and sums 1 GiB of this process's GPU memory."""
    context = torch.multiprocessing.get_context("spawn")
    sent, answered = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_sum_shared, args=(sent, answered))
    process.start()
    tensors = [torch.full((2**23,), index, dtype=torch.bfloat16, device=device) for index in range(64)]
    torch.cuda.synchronize()
    answered.get()  # it has started
    started = time.perf_counter()
    sent.put(tensors)
    sums = answered.get()
    seconds = time.perf_counter() - started
    process.join()
    if sums != [float(index) for index in range(64)]:
        raise SystemExit(f"CUDA IPC: expected the same tensors in the other process, got the means {sums}")
    return seconds


def _sum_shared(sent: Any, answered: Any) -> None:
    torch.zeros(1, device="cuda")
    answered.put("started")
    tensors = sent.get()
    answered.put([float(tensor.float().mean()) for tensor in tensors])
    del tensors


PARTS = {"card": 60, "engine": 120, "learner": 240, "agreement": 120, "weights": 120, "training": 420, "vllm": 300}
"""Seconds that each part may take of a GPU's time."""


def run_part(part: str, args: argparse.Namespace, model: Path, seconds: float) -> tuple[Numbers, str]:
    """Run a part in its own process; return the figures of the last line that it printed, and what failed."""
    command = [sys.executable, __file__, "--part", part, "--model", str(model), "--device", args.device]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--size", args.size],
            stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        problem = ""
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # engines and trainings that it started hold the GPU
            printed, _ = process.communicate()
            problem = f"it took more than {seconds:.0f} s"
        if process.returncode and not problem:
            log.seek(0)
            problem = f"exit code {process.returncode}\n{log.read()[-3000:]}"
    return json.loads((["{}"] + [line for line in printed.splitlines() if line.startswith("{")])[-1]), problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", default="gpu", help="files to write, without .json and .md")
    parser.add_argument(
        "--budget_s", type=float, default=600, help="of all parts: a part gets at most what is left, and 1 s"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(getattr(Bench(args), args.part)()))
        return
    if args.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("--device: expected a GPU, torch sees none. Use --device cpu --size tiny to try the script")
    deadline, found, failed = time.monotonic() + args.budget_s, {}, {}
    where = machine() + ("" if args.device == "cpu" else f", {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.size, args.device)
        torch.cuda.empty_cache()
        for part in args.parts:
            print(f"{part} …", file=sys.stderr, flush=True)
            limit_s = min(math.inf if args.device == "cpu" else PARTS[part], deadline - time.monotonic())
            found[part], problem = run_part(part, args, Path(folder), max(1.0, limit_s))
            if problem:
                failed[part] = problem
    text = report(where, args.size, found, failed)
    Path(f"{args.out}.json").write_text(
        json.dumps({"machine": where, "size": args.size, "figures": found, "failed": failed}, indent=1)
    )
    Path(f"{args.out}.md").write_text(text)
    print(text)


def report(where: str, size: str, found: Mapping[str, Numbers], failed: Mapping[str, str]) -> str:
    """Return the table; TFLOP/s are also given as a share of the card's."""
    rate = found.get("card", {}).get("bf16 matrix products, TFLOP/s")
    lines = [f"{where}; Qwen2 of {size} random weights", "", "| part | what | figure |", "|---|---|---:|"]
    for part, figures in found.items():
        for name, value in figures.items():
            share = f" ({value / rate:.0%} of the card)" if rate and part == "learner" and "TFLOP" in name else ""
            lines.append(f"| {part} | {name} | {value:,.4g}{share} |")
    return "\n".join([*lines, *(f"\n{part} failed: {problem}" for part, problem in failed.items())]) + "\n"


if __name__ == "__main__":
    main()
