"""Asynchronous training compared with the synchronous loop: seconds for the same number of samples if episodes wait.

    python benchmarks/train_async.py

Episodes have a number of turns from a heavy tail (median 2, one in twenty 8 or more, at most 12), and each turn waits
for its environment (median 0.2 s, one in twenty 1.5 s or more, at most 6 s), as sandboxes and browsers have agents
wait; both are drawn per task from its seed, the same in every way. The policy is tiny-math, trained for `--epochs`
passes over each batch, so that training takes about as long as sampling does. All ways have the same number of episodes
in flight at most, and the same flags but these:

    sync      none
    async     --async_train --async_queue_size N: batches are sampled ahead; episodes end before a weight update
    partial   --partial_rollout as well: episodes continue across new weights
    generate  partial with a learner that does nothing: the time of sampling alone
    train     the time of training alone: the seconds of sync's train steps, during which nothing samples

No variant can be faster than max(generate, train); `of bound` is a variant's time relative to it. Seconds are those of
all train steps, start-up not counted; CPU seconds are those of the process that trains, start-up included. The engine
is in an actor of Ray, as it is by default; `--in_process` puts it beside the learner, and the two share the
interpreter's lock.

Two idle cores are enough: training overlaps with waiting, and simultaneous computations have a core each
(OMP_NUM_THREADS=1). If sampling alone uses all cores, like a large model on a CPU, running both at once saves no time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.types import StepResult

ROOT = Path(__file__).parents[1]
WAYS = ("sync", "async", "partial", "generate")
MAX_TURNS, MAX_WAIT_S = 12, 6.0


def heavy_tailed(rng: random.Random, median: float, p95: float) -> float:
    """Return a random number of the log-normal distribution with this median and 95th percentile."""
    return median * math.exp(rng.gauss(0.0, 1.0) * math.log(p95 / median) / 1.645)


class Waits(AgentInstance):
    """An environment whose number of turns and waiting times depend on its seed."""

    def __init__(self, speed: float = 1.0) -> None:
        """Wait `speed` times shorter."""
        self.speed = speed
        self.waits_s: list[float] = []

    async def reset(self, states: ResetState) -> ResetState:
        """Draw the turns and their waits."""
        rng = random.Random(states["seed"])
        num = max(1, min(MAX_TURNS, round(heavy_tailed(rng, 2.0, 8.0))))
        self.waits_s = [min(MAX_WAIT_S, heavy_tailed(rng, 0.2, 1.5)) / self.speed for _ in range(num)]
        return states

    async def step(self, states: StepState) -> StepResult:
        """Wait, and reward digits."""
        turn, text = states["turn_index"], states["action_text"]
        await asyncio.sleep(self.waits_s[turn])
        reward = sum(c.isdigit() for c in text) / max(1, len(text)) / len(self.waits_s)
        return StepResult("That is not it.", reward=reward, terminated=turn + 1 == len(self.waits_s))


@dataclass(frozen=True)
class Measured:
    """The totals of one variant's train steps."""

    wall_s: float
    wait_s: float
    train_s: float
    sync_s: float
    staleness_mean: float
    staleness_max: float
    turns: float
    num_samples: float
    cpu_s: float = 0.0

    @property
    def idle_share(self) -> float:
        """The share of the time in which the learner does not train."""
        return 1 - self.train_s / self.wall_s


def flags_of(way: str, args: argparse.Namespace, out: Path) -> list[str]:
    """Return the command line of `agentenv train`."""
    flags = {
        "env": f"{Path(__file__).resolve()}:Waits", "env_kwargs": json.dumps({"speed": args.speed}),
        "data": "word_problems", "max_train_steps": args.steps, "rollout_batch_size": args.groups,
        "n": args.samples, "concurrency": args.concurrency, "max_turns": MAX_TURNS,
        "max_tokens": args.tokens, "engine": args.engine, "max_epochs": args.epochs,
        "advantage_estimator": "group_norm", "actor_learning_rate": 1e-6, "micro_train_batch_size": 16,
        "save_samples": 0, "out": out, "progress": "none",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--no_ray"] if args.in_process else []
    if way != "sync":
        words += ["--async_train", "--async_queue_size", str(args.queue)]
    return words + (["--partial_rollout"] if way in ("partial", "generate") else [])


def child(flags: list[str], *, idle: bool) -> int:
    """Run `agentenv train`, with a learner that does nothing if `idle`."""
    from agentenv.cli.main import main as agentenv
    from agentenv.training.learner import learner

    class Idle(learner.Learner):
        """A learner that returns at once without training; its weights still go to the engines."""

        def train_step(self, batch: Any) -> dict[str, float]:
            """Nothing."""
            return {}

    if idle:
        learner.Learner = Idle  # type: ignore[misc]
    return agentenv(["train", *flags])


def measure(way: str, args: argparse.Namespace, folder: Path) -> Measured:
    """Run one variant in a separate process."""
    out = folder / way
    settings = json.dumps({"flags": flags_of(way, args, out), "idle": way == "generate"})
    paths = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ | {"PYTHONPATH": paths}
    before = cpu_seconds()
    done = subprocess.run([sys.executable, __file__, "--child", settings], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way}: expected exit code 0, got {done.returncode}.\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return replace(summed(lines), cpu_s=cpu_seconds() - before)


def cpu_seconds() -> float:
    """Return the CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summed(lines: list[Mapping[str, float]]) -> Measured:
    """Return the totals of the lines of a metrics.jsonl."""
    wall_s, wait_s, train_s, sync_s = (
        sum(line[f"time/{name}_s"] for line in lines) for name in ("wall", "wait", "train", "sync")
    )
    return Measured(
        wall_s,
        wait_s,
        train_s,
        sync_s,
        staleness_mean=statistics.mean(line["rollout/staleness_mean"] for line in lines),
        staleness_max=max(line["rollout/staleness_max"] for line in lines),
        turns=statistics.mean(line["rollout/turns"] for line in lines),
        num_samples=sum(line["rollout/num_episodes"] for line in lines),
    )


def report(found: Mapping[str, Measured], args: argparse.Namespace) -> None:
    first = found["sync"]
    generate_s, train_s = found["generate"].wall_s, first.train_s
    where = "in the learner's process" if args.in_process else "in a Ray actor"
    print(f"{args.steps} train steps of {args.groups} × {args.samples} samples, {args.concurrency} episodes in flight,")
    print(f"{args.queue} batches ahead at most, engine {args.engine} {where}\n")
    print("| way | seconds | faster than sync | of bound | learner waits | trains | new weights | idle "
          "| staleness, mean and max | turns | CPU s |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for way, one in found.items():
        if one.num_samples != first.num_samples:
            raise SystemExit(f"{way}: expected {first.num_samples} samples, got {one.num_samples}: not the same work")
        bound = "" if way == "generate" else f"{one.wall_s / max(generate_s, train_s):.2f}"
        row = f"{one.wall_s:.1f} | {first.wall_s / one.wall_s:.2f} | {bound} | {one.wait_s:.1f} | {one.train_s:.1f}"
        ages = f"{one.staleness_mean:.2f} / {one.staleness_max:.0f}"
        print(
            f"| {way} | {row} | {one.sync_s:.1f} | {one.idle_share:.0%} | {ages} | {one.turns:.2f} | {one.cpu_s:.0f} |"
        )
    print(
        f"\ngenerate alone {generate_s:.1f} s, train alone {train_s:.1f} s: no way takes less than the longer of them"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14, help="train steps of each way")
    parser.add_argument("--groups", type=int, default=8, help="prompts of a train step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--concurrency", type=int, default=64, help="episodes in flight")
    parser.add_argument("--queue", type=int, default=4, help="--async_queue_size of async and partial")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an action at most")
    parser.add_argument("--epochs", type=int, default=3, help="passes of the learner over each batch")
    parser.add_argument("--speed", type=float, default=1.0, help="environments are so many times faster")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--in_process", action="store_true", help="the engine in this process, not in an actor of Ray")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--small", action="store_true", help="3 steps of 2 x 2 samples, as a smoke test")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.small:
        args.steps, args.groups, args.samples, args.speed = 3, 2, 2, 20.0
    if missing := {"sync", "generate"} - set(args.ways):
        parser.error(
            f"--ways: expected sync and generate among them, which others are compared with; {missing} missing"
        )
    return args


def main() -> None:
    args = parse()
    if args.child is not None:
        settings = json.loads(args.child)
        sys.exit(child(settings["flags"], idle=settings["idle"]))
    from common import machine

    print(machine(), end="\n\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        found: dict[str, Measured] = {}
        for way in args.ways:
            found[way] = measure(way, args, Path(name))
            print(f"{way}: {found[way].wall_s:.1f} s", file=sys.stderr, flush=True)
        report(found, args)


if __name__ == "__main__":
    main()
