"""Does a long run grow? Scripted episodes through the whole runner and its record; memory, files, tasks and threads.

    python benchmarks/soak.py --episodes 100000

Every episode has two turns, one in ten a plain `step` (a thread), one in a hundred an engine that fails once (a retry);
each record is written as `agentenv run` writes it, under the same watchdog. The resident memory (RSS) is read after
each twentieth of the episodes, when the collector has run; the slope is that of the line through the last three
quarters, in bytes per episode. What a run must keep is its table of results: it is weighed apart, as `summaries`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

from agentenv.agent import AgentInstance
from agentenv.chat import Chat
from agentenv.engines.scripted import Request, ScriptedEngine
from agentenv.errors import EngineError
from agentenv.loading import EnvSource
from agentenv.record import RunWriter
from agentenv.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.trajectory import Trajectory
from agentenv.types import Limits, SamplingParams, StepResult, Task
from agentenv.watchdog import Watchdog

PAGE = os.sysconf("SC_PAGE_SIZE")


class Turns(AgentInstance):
    async def reset(self, states: Any) -> Any:
        if int(states["label"]) % 10 == 0:
            self.step = self.plain_step  # type: ignore[method-assign, assignment]
        return states

    async def step(self, states: Any) -> StepResult:
        return self.plain_step(states)

    def plain_step(self, states: Any) -> StepResult:
        last = states["turn_index"] == 1
        return StepResult("" if last else "and now?", reward=1.0, score=float(last), terminated=last)


class Engine(ScriptedEngine):
    """Keeps no request; fails the first attempt of one episode in a hundred."""

    async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, *, request_id: str) -> Any:
        completion = await super().generate(prompt_token_ids, sampling, request_id=request_id)
        self.requests.clear()
        return completion


def make_script() -> Any:
    failed: set[str] = set()

    def script(request: Request) -> Any:
        episode = request.episode_id
        if episode.endswith("00/0") and request.turn_index == 0 and episode not in failed:
            failed.add(episode)
            return EngineError("soak: once")
        failed.discard(episode)
        return "I think that it is 42."

    return script


def facts() -> dict[str, int]:
    statm = Path("/proc/self/statm").read_text().split()
    return {
        "rss": int(statm[1]) * PAGE,
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
    }


def slope(points: list[tuple[int, int]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def weigh_summaries(writer: RunWriter) -> float:
    """Bytes per episode of the table of results, by making a copy of what is in it."""
    import pickle

    some = {key: pickle.dumps(value) for key, value in list(writer.summaries.items())[:2000]}
    gc.collect()
    tracemalloc.start()
    held = {key: pickle.loads(value) for key, value in some.items()}
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / max(len(held), 1)


async def soak(num: int, concurrency: int, folder: Path, *, keep: bool) -> None:
    tokenizer = CharTokenizer()
    runner = EpisodeRunner(
        EnvSource(Turns, {}),
        engine=Engine(make_script(), tokenizer),
        chat=Chat(tokenizer),
        sampling=SamplingParams(seed=0),
        limits=Limits(max_length=400, max_turns=4),
        concurrency=concurrency,
        policy=ErrorPolicy(retry_wait_s=0.01),
    )
    points: list[tuple[int, dict[str, int]]] = []
    tasks = (Task(f"What is {i}?", label=str(i), task_id=f"{i:06d}") for i in range(num))
    begun = time.perf_counter()
    with RunWriter.open(folder, {}) as writer:

        async def on_end(trajectory: Trajectory) -> None:
            await asyncio.to_thread(writer.append, trajectory)
            if not keep:
                writer.summaries.pop(trajectory.episode_id, None)
            if runner.num_done >= (len(points) + 1) * num / 20:
                gc.collect()
                points.append((runner.num_done, facts()))

        with Watchdog(runner, folder=folder, stall_timeout_s=600.0, tell=lambda text: print(text)) as watchdog:
            await watchdog.guard(asyncio.ensure_future(runner.run(plan(tasks, 1), on_end)))
        wall_s = time.perf_counter() - begun
        per_summary = weigh_summaries(writer)
    print(f"{'episodes':>9} {'RSS MiB':>8} {'fds':>4} {'tasks':>6} {'threads':>8}")
    for done, fact in points:
        print(f"{done:>9} {fact['rss'] / 2**20:>8.1f} {fact['fds']:>4} {fact['tasks']:>6} {fact['threads']:>8}")
    late = points[len(points) // 4 :]
    counts = f"{runner.num_retries} retries, {runner.num_failed} failed"
    print(f"{num} episodes in {wall_s:.1f} s: {num / wall_s:.0f}/s, {counts}")
    print(f"RSS slope {slope([(done, fact['rss']) for done, fact in late]):.1f} bytes an episode, "
          f"of which summaries {per_summary if keep else 0:.0f}")  # fmt: skip
    for name in ("fds", "tasks", "threads"):
        values = [fact[name] for _, fact in late]
        print(f"{name}: {min(values)} to {max(values)}, at the end {facts()[name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--forget", action="store_true", help="drop the table of results, to see what else grows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(soak(options.episodes, options.concurrency, Path(folder), keep=not options.forget))


if __name__ == "__main__":
    sys.exit(main())
