"""Growth of a long run: memory, files, tasks and threads of scripted episodes through the whole runner and its record.

    python benchmarks/soak.py --episodes 100000

Every episode has two turns, one in ten a plain `step` (a thread), one in a hundred an engine that fails once (a retry);
each record is written as `agentenv run` writes it, under the same watchdog. The resident memory (RSS) is read after
each twentieth of the episodes, after garbage collection; the slope is that of a line through the last three
quarters, in bytes per episode. `--resume` opens the record again at the end and compares the metrics.
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
from pathlib import Path
from typing import Any

from common import machine

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, SamplingParams, StepResult, Task
from agentenv.engines.scripted import Request, ScriptedEngine
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.errors import EngineError
from agentenv.runs.metrics import Tally
from agentenv.runs.records.directory import Outbox, RunWriter
from agentenv.runs.records.index import INDEX
from agentenv.runs.watchdog import Watchdog
from agentenv.testing.tokenizers import CharTokenizer

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


def make_runner(concurrency: int) -> EpisodeRunner:
    tokenizer = CharTokenizer()
    return EpisodeRunner(
        EnvSource(Turns, {}),
        EpisodeSetup(
            engine=Engine(make_script(), tokenizer),
            chat=Chat(tokenizer),
            sampling=SamplingParams(seed=0),
            limits=Limits(max_length=400, max_turns=4),
        ),
        concurrency=concurrency,
        policy=ErrorPolicy(retry_wait_s=0.01),
    )


async def soak(num: int, concurrency: int, folder: Path, *, resume: bool) -> None:
    runner, tally = make_runner(concurrency), Tally(1)
    points: list[tuple[int, dict[str, int]]] = []
    tasks = (Task(f"What is {i}?", label=str(i), task_id=f"{i:06d}") for i in range(num))
    started = time.perf_counter()
    async with Outbox(RunWriter.open(folder, {}, tally=tally)) as outbox:

        async def on_end(trajectory: Trajectory) -> None:
            await outbox.append(trajectory)
            if runner.num_done >= (len(points) + 1) * num / 20:
                gc.collect()
                points.append((runner.num_done, facts()))

        with Watchdog(runner, folder=folder, stall_timeout_s=600.0, tell=lambda text: print(text)) as watchdog:
            await watchdog.guard(asyncio.ensure_future(runner.run(plan(tasks, 1), on_end)))
        await outbox.settle()
        wall_s = time.perf_counter() - started
    report(points, f"{runner.num_retries} retries, {runner.num_failed} failed", wall_s)
    if resume:
        metrics = tally.metrics(num_tasks=num, num_samples=1, wall_s=1.0)
        print()
        for what in ("with its index", "without an index"):
            began = time.process_time()
            with RunWriter.open(folder, {}, resume=True, tally=Tally(1)) as writer:
                cpu_s = time.process_time() - began
                same = writer.tally.metrics(num_tasks=num, num_samples=1, wall_s=1.0) == metrics
            print(f"reopened {what} in {cpu_s:.2f} s of CPU: {'the same metrics' if same else 'OTHER METRICS'}")
            (folder / INDEX).unlink()


def report(points: list[tuple[int, dict[str, int]]], counts: str, wall_s: float) -> None:
    num, at_end = points[-1][0], facts()
    print("| episodes | RSS MiB | fds | tasks | threads |\n|---:|---:|---:|---:|---:|")
    for done, fact in points:
        print(f"| {done:,} | {fact['rss'] / 2**20:.1f} | {fact['fds']} | {fact['tasks']} | {fact['threads']} |")
    late = points[len(points) // 4 :]
    print(f"\n{num:,} episodes in {wall_s:.1f} s: {num / wall_s:.0f}/s, {counts}")
    print(f"RSS slope {slope([(done, fact['rss']) for done, fact in late]):.1f} bytes an episode")
    for name in ("fds", "tasks", "threads"):
        values = [fact[name] for _, fact in late]
        print(f"{name}: {min(values)} to {max(values)}, at the end {at_end[name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="2,000 episodes, as a smoke test")
    parser.add_argument("--resume", action="store_true", help="open the record again at the end and compare it")
    options = parser.parse_args()
    print(machine(), end="\n\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        num = 2_000 if options.small else options.episodes
        asyncio.run(soak(num, options.concurrency, Path(folder), resume=options.resume))


if __name__ == "__main__":
    sys.exit(main())
