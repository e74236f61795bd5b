"""Episodes in 0, 1 and 2 workers with an engine that costs nothing, and what an episode costs the driver.

    python benchmarks/rollout_workers.py

math_retry with tiny-math's tokenizer and a script that answers wrongly, so that every episode has three turns. Each
variant runs in this process with a run directory, as `agentenv run` does; rounds alternate, results are medians.
`driver CPU` is the CPU time of the driver's process per episode, without that of its workers and without the start.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import tempfile
import time
from pathlib import Path

from common import machine

from agentenv.episode.runner import plan
from agentenv.runs.config import RunConfig
from agentenv.runs.opening import open_runner
from agentenv.runs.prepare import prepare
from agentenv.runs.records.directory import Outbox
from agentenv.runs.run import open_run


async def measured(workers: int, args: argparse.Namespace) -> tuple[float, float, int]:
    """Return the episodes per second, the driver's CPU milliseconds per episode, and the tokens of an episode."""
    reply = "\n".join(["1 + 1 = 3, so the answer is wrong."] * args.lines) + "\n#### 1000000"
    config = RunConfig.from_flags(
        env="math_retry", engine="scripted", engine_args={"script": [reply]}, max_tokens=4096, max_length=16384,
        limit=args.tasks, n=args.n, concurrency=args.concurrency, rollout_workers=workers, progress="none",
    )  # fmt: skip
    job = await prepare(config)
    num_tokens = 0
    with tempfile.TemporaryDirectory() as folder:
        async with Outbox(open_run(job, Path(folder) / "run")) as outbox, open_runner(job, only_records=True) as runner:

            async def record(trajectory):  # type: ignore[no-untyped-def]
                nonlocal num_tokens
                summary = await outbox.append(trajectory)
                num_tokens = summary.num_prompt_tokens + summary.num_action_tokens + summary.num_observation_tokens

            planned = list(plan(job.tasks, config.n))
            await runner.run(planned[: args.concurrency], record)  # workers import and probe what the first one needs
            used, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            await runner.run(planned[args.concurrency :], record)
            wall_s, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    num = len(planned) - args.concurrency
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return num / wall_s, 1000 * cpu_s / num, num_tokens


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    for flag, value in {"tasks": 150, "n": 8, "concurrency": 64, "rounds": 3, "lines": 10}.items():
        parser.add_argument(f"--{flag}", type=int, default=value)
    args = parser.parse_args()
    found: dict[int, list[tuple[float, float, int]]] = {}
    for _ in range(args.rounds):
        for workers in (0, 1, 2):
            found.setdefault(workers, []).append(asyncio.run(measured(workers, args)))
    print(machine())
    print(f"tokens per episode: {found[0][0][2]}\n")
    print("| workers | episodes/s | against 1 worker | driver CPU, ms per episode |")
    print("|---|---|---|---|")
    rates = {workers: statistics.median(each[0] for each in rows) for workers, rows in found.items()}
    for workers, rows in found.items():
        cpu_ms = statistics.median(each[1] for each in rows)
        print(f"| {workers} | {rates[workers]:.0f} | {rates[workers] / rates[1]:.2f} | {cpu_ms:.2f} |")


if __name__ == "__main__":
    main()
