"""Many long episodes at once on one event loop: lag, memory of a live token, and whether a turn's cost grows.

    python benchmarks/many_and_long.py --episodes 5000 --turns 50 --tokens 500

All episodes run at the same time, through the runner and without a record, over raw text. An action has `--tokens`
ids with a log-probability each, different ones at every turn; the engine takes `--latency_s` and keeps nothing.
`CPU µs per turn` is the process's CPU time for each tenth of all turns, the engine's random draws included. A short run
comes first: with costs that do not grow, the last tenth of the long run costs what a short run costs a turn.
The defaults are small; the command above needs about 7 GiB of memory and 6 minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

from common import Ticker, machine

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, Task
from agentenv.episode.runner import EpisodeRunner, plan
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.testing.tokenizers import CharTokenizer

PAGE = os.sysconf("SC_PAGE_SIZE")
NUM_PARTS = 10


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Long(AgentInstance):
    num_turns = 1

    async def step(self, states: Any) -> StepResult:
        turn = states["turn_index"] + 1
        return StepResult(f"\nThat was turn {turn}. And now?\n", reward=1.0, terminated=turn == self.num_turns)


class RandomEngine(Engine):
    """Samples random ids, and reads the clocks when the episodes reach the next part of their turns."""

    def __init__(self, args: argparse.Namespace, num_turns: int) -> None:
        self._args, self._num_turns = args, num_turns
        self._random = random.Random(0)
        self.num_calls = 0
        self.points: list[tuple[int, float, int]] = []
        """Of each part: the calls before it, the CPU time, and the resident memory."""

    async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, *, request_id: str) -> Completion:
        if self.num_calls % max(1, self._args.episodes * self._num_turns // NUM_PARTS) == 0:
            self.points.append((self.num_calls, time.process_time(), rss()))
        self.num_calls += 1
        await asyncio.sleep(self._args.latency_s * (0.5 + self._random.random()))
        draw, num = self._random.randrange, self._args.tokens
        return Completion(
            tuple([draw(97, 122) for _ in range(num)]),
            "stop",
            logprobs=tuple([-draw(1, 900) / 100 for _ in range(num)]),
        )


async def measured(args: argparse.Namespace, num_turns: int) -> None:
    """Run the episodes and print a table."""
    Long.num_turns, tokenizer = num_turns, CharTokenizer()
    engine, failed, most = RandomEngine(args, num_turns), list[str](), [0, 0]
    runner = EpisodeRunner(
        EnvSource(Long, {}),
        EpisodeSetup(
            engine,
            Chat(tokenizer),
            SamplingParams(),
            Limits(max_length=(args.tokens + 60) * num_turns + 100, max_turns=num_turns, episode_timeout_s=1e6),
        ),
        concurrency=args.episodes,
    )

    async def on_end(trajectory: Trajectory) -> None:
        if trajectory.error is not None or len(trajectory.turns) != num_turns:
            failed.append(repr(trajectory))
        if not most[0]:  # the first to end: all others are at most one turn short of theirs
            most[:] = [rss(), sum(each.num_tokens for each in runner.in_flight.values())]

    gc.collect()
    before, cpu_s, started = rss(), time.process_time(), time.perf_counter()
    async with Ticker(0.01) as ticker:
        await runner.run(plan((Task("Go.\n", task_id=str(i)) for i in range(args.episodes)), 1), on_end)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    turns = engine.num_calls
    print(f"\n{args.episodes} episodes x {num_turns} turns x {args.tokens} tokens: {len(failed)} failed {failed[:1]}")
    print(f"{wall_s:.0f} s wall, {cpu_s:.0f} s CPU, {1e6 * cpu_s / turns:.0f} µs of CPU a turn")
    print(f"{(most[0] - before) / max(1, most[1]):.1f} bytes a live token ({most[1]:,} tokens)")
    print(
        f"the loop's lag: worst {1000 * ticker.worst_s:.0f} ms, {100 * ticker.late_s / wall_s:.0f} % of the time late"
    )
    print("\n| turns done | CPU µs per turn | resident MiB |\n|---:|---:|---:|")
    for (calls, at_s, _), (more, then_s, size) in zip(engine.points, engine.points[1:], strict=False):
        print(f"| {more:,} | {1e6 * (then_s - at_s) / (more - calls):.0f} | {size / 2**20:.0f} |")


def main() -> None:
    """Print a table of the short run and one of the long run."""
    parser = argparse.ArgumentParser()
    for flag, value in {"episodes": 200, "turns": 50, "tokens": 500, "short_turns": 5}.items():
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--latency_s", type=float, default=0.5)
    args = parser.parse_args()
    print(machine())
    for num_turns in (args.short_turns, args.turns):
        asyncio.run(measured(args, num_turns))


if __name__ == "__main__":
    main()
