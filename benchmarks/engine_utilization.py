"""How busy episodes keep vLLM: tokens per second of multi-turn math_retry compared with the same requests without
episodes.

    python benchmarks/engine_utilization.py

One AsyncLLM serves all ways, one thread of the engine's process (OMP_NUM_THREADS=1). `raw` sends what a first round of
episodes recorded: for every episode its prompts, one after the other, as many episodes at once and in the same order,
for as many tokens as were recorded (`ignore_eos`), with the same sampling parameters (greedy, the sampled tokens'
log-probabilities on, no detokenizing), and drops the answers. Greedy tokens repeat, so that the prefix cache, emptied
before each round, finds as much for one as for the other; the tables say so. `episodes` is the runner with
environment, chat template, grading and trajectories; `recorded` also writes each one to a run directory, as
`agentenv run` does. The ways take turns; medians. CPU is this process's own (the engine has another).

Without `--model`, a Qwen2 of 4 layers, 128 wide, with random weights is made on the spot: it never answers right, so
that every episode has three turns. `--profile` shows where this process spends its time in one more round.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common import ROOT, machine

from agentenv.chat.chat import Chat
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, SamplingParams, Task
from agentenv.engines.models import load_stop_token_ids, load_tokenizer
from agentenv.engines.vllm.local import VLLMEngine
from agentenv.engines.vllm.wire import vllm_sampling
from agentenv.episode.runner import EpisodeRunner, plan
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.runs.records.directory import Outbox, RunWriter
from agentenv_envs.math_retry import MathRetry

sys.path.insert(0, str(ROOT))
from examples.make.word_problems import make_problems  # after the path is set
from tests.models import make_tiny_qwen2

MAX_LENGTH = 2048


@dataclass(frozen=True)
class Asked:
    """One request of the recorded workload."""

    prompt: list[int]
    action: list[int]
    num_cached: int


@dataclass(frozen=True)
class Round:
    """The measurements of one round of one variant."""

    num_tokens: int
    num_prompt: int
    num_cached: int
    num_turns: int
    wall_s: float
    cpu_s: float
    same: float = 1.0
    """Share of the recorded actions that were reproduced token by token."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


class Bench:
    """The engine, and the variants of load."""

    def __init__(self, engine: VLLMEngine, model: str, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        self.chat = Chat(load_tokenizer(model), stop_token_ids=load_stop_token_ids(model))
        self.sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens)
        self.tasks = [
            Task([{"role": "user", "content": problem.question}], f"#### {problem.answer}", task_id=f"{i:06d}")
            for i, problem in enumerate(make_problems(args.episodes, 0))
        ]
        self.workload: list[list[Asked]] = []

    async def begin(self) -> tuple[float, float]:
        await self.engine._llm.reset_prefix_cache()
        return time.perf_counter(), time.process_time()

    async def episodes(self, folder: Path | None) -> Round:
        """Run a round of episodes; the records of the first round are the workload of `raw`."""
        runner = EpisodeRunner(
            EnvSource(MathRetry, {}),
            EpisodeSetup(
                engine=self.engine,
                chat=self.chat,
                sampling=self.sampling,
                limits=Limits(max_length=MAX_LENGTH, max_turns=3),
            ),
            concurrency=self.args.concurrency,
        )
        made: dict[str, list[Asked]] = {}
        started, cpu = await self.begin()
        if folder is None:
            await runner.run(plan(self.tasks, 1), lambda trajectory: keep(trajectory, made))
        else:
            async with Outbox(RunWriter.open(folder, {})) as outbox:

                async def on_end(trajectory: Trajectory) -> None:
                    await outbox.append(trajectory)
                    keep(trajectory, made)

                await runner.run(plan(self.tasks, 1), on_end)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        if runner.num_failed:
            raise SystemExit(f"{runner.num_failed} episodes failed: {dict(runner.errors)}")
        workload = [made[key] for key in sorted(made)]
        self.workload = self.workload or workload
        turns = [turn for episode in workload for turn in episode]
        return Round(
            sum(len(turn.action) for turn in turns),
            sum(len(turn.prompt) for turn in turns),
            sum(turn.num_cached for turn in turns),
            len(turns),
            wall_s,
            cpu_s,
            same=share_same(workload, self.workload),
        )

    async def raw(self) -> Round:
        """Send the recorded requests directly to vLLM."""
        from vllm.inputs.engine import tokens_input

        llm = self.engine._llm
        counts = [0, 0, 0, 0, 0]  # tokens, prompt tokens, cached ones, turns, reproduced actions
        started, cpu = await self.begin()
        pending = iter(enumerate(self.workload))
        params = {num: self._params(num) for episode in self.workload for num in {len(t.action) for t in episode}}

        async def worker(pending: Iterator[tuple[int, list[Asked]]]) -> None:
            for index, episode in pending:
                for turn_index, turn in enumerate(episode):
                    name = f"raw-{started}-{index}/{turn_index}"
                    asked = llm.generate(tokens_input(turn.prompt), params[len(turn.action)], name)
                    out = [output async for output in asked][-1]
                    counts[0] += len(out.outputs[0].token_ids)
                    counts[1] += len(turn.prompt)
                    counts[2] += out.num_cached_tokens or 0
                    counts[3] += 1
                    counts[4] += list(out.outputs[0].token_ids) == turn.action

        await asyncio.gather(*(worker(pending) for _ in range(self.args.concurrency)))
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        return Round(*counts[:4], wall_s, cpu_s, same=counts[4] / counts[3])

    def _params(self, num_tokens: int) -> Any:
        params = vllm_sampling(replace(self.sampling, max_tokens=num_tokens, stop_token_ids=()))
        params.ignore_eos = True
        return params


def keep(trajectory: Trajectory, made: dict[str, list[Asked]]) -> None:
    ids = list(trajectory.token_ids)
    made[trajectory.episode_id] = [
        Asked(ids[: turn.start], ids[turn.start : turn.end], turn.num_cached_tokens) for turn in trajectory.turns
    ]


def share_same(made: list[list[Asked]], recorded: list[list[Asked]]) -> float:
    pairs = [
        (mine.action, theirs.action)
        for one, other in zip(made, recorded, strict=True)
        for mine, theirs in zip(one, other, strict=False)
    ]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


async def measure(bench: Bench, folder: Path) -> None:
    ways = {
        "raw": bench.raw,
        "episodes": lambda: bench.episodes(None),
        "recorded": lambda: bench.episodes(folder / f"run-{time.monotonic_ns()}"),
    }
    await bench.episodes(None)  # records the workload, and fills caches
    await bench.raw()
    rounds: dict[str, list[Round]] = {name: [] for name in ways}
    for index in range(bench.args.rounds):
        order = list(ways) if index % 2 == 0 else list(ways)[::-1]
        for name in order:
            rounds[name].append(await ways[name]())
    report(rounds, bench.args)
    if bench.args.profile:
        profile = cProfile.Profile()
        profile.enable()
        await bench.episodes(None)
        profile.disable()
        stats = pstats.Stats(profile)
        stats.sort_stats("tottime").print_stats(25)
        stats.sort_stats("cumulative").print_stats("/agentenv", 40)


def report(rounds: dict[str, list[Round]], args: argparse.Namespace) -> None:
    first = rounds["raw"][0]
    print(
        f"{args.episodes} episodes, {args.concurrency} at once, {first.num_turns} requests: {first.num_prompt:,} prompt"
    )
    print(f"and {first.num_tokens:,} sampled tokens a round; medians of {args.rounds} rounds\n")
    print("| way | tokens/s | of raw | lowest and highest of a round | CPU s | cached | same tokens |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    base = statistics.median(r.tokens_per_s for r in rounds["raw"])
    for name, made in rounds.items():
        speed = statistics.median(r.tokens_per_s for r in made)
        ratios = [one.tokens_per_s / raw.tokens_per_s for one, raw in zip(made, rounds["raw"], strict=True)]
        cpu_s = statistics.median(r.cpu_s for r in made)
        cached = statistics.median(r.num_cached / r.num_prompt for r in made)
        same = min(r.same for r in made)
        row = f"{speed:,.0f} | {speed / base:.3f} | {min(ratios):.3f} to {max(ratios):.3f} | {cpu_s:.2f}"
        print(f"| {name} | {row} | {cached:.1%} | {same:.1%} |")
    print()
    for name, made in rounds.items():
        print(f"{name}: {', '.join(f'{r.wall_s:.2f}' for r in made)} s")


async def run(args: argparse.Namespace, folder: Path) -> None:
    model = args.model or str(make_tiny_qwen2(folder / "qwen2", vocab_size=2048, layers=4, width=128))
    engine = VLLMEngine(model, dtype="float32", max_model_len=MAX_LENGTH, max_num_seqs=args.concurrency)
    await engine.start()
    try:
        await measure(Bench(engine, model, args), folder)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; made on the spot when left out")
    parser.add_argument("--episodes", type=int, default=192)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an action at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--small", action="store_true", help="32 episodes, two rounds, as a smoke test")
    args = parser.parse_args()
    if args.small:
        args.episodes, args.rounds, args.concurrency = 32, 2, 16
    print(machine(), end="\n\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(args, Path(folder)))


if __name__ == "__main__":
    main()
