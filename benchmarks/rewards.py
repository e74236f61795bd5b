r"""Math checks per second, compared with ROLL's process per sample, and the event-loop lag meanwhile.

    python benchmarks/rewards.py --num-checks 2000 --num-slow 40 --rounds 3

ROLL's way, written here from its description: for each sample in turn a `multiprocessing.Manager()` and a `Process`
that parses label and answer with math-verify and leaves its verdict in the manager's dict; math-verify is imported
before, so the forks find it loaded. Ours: `MathReward` as a trainer calls it, and its workers alone, without the fast
path and the caches. Both judge the same answers in the same run, alternating; disagreements are counted and shown.

Then the loop: math, IFEval, regex and JSON-schema rewards all at once, hostile answers among them, while a task
scheduled every millisecond records its delay.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import random
import statistics
import time
from typing import Any

from common import machine
from math_grader import write

from agentenv.rewards.grading import grade_all
from agentenv.rewards.rules.math.reward import MathGrader, MathReward, extract_answer, parse_label
from agentenv.rewards.types import Response, Reward, Status
from agentenv.rewards.workers.pool import shared_pool

JOIN_S = 6.0


# --- a process per sample -------------------------------------------------------------------------------------------


def _check(label: str, answer: str | None, verdict: Any) -> None:
    from math_verify import parse, verify

    if answer is None:
        verdict["correct"] = False
        return
    gold = parse(f"${label}$", fallback_mode="no_fallback", parsing_timeout=None)
    pred = parse(f"${answer}$", fallback_mode="no_fallback", parsing_timeout=None)
    verdict["correct"] = bool(gold and pred and verify(gold[0], pred[0], timeout_seconds=None))


def process_per_sample(batch: list[Response]) -> list[bool]:
    """Check each answer, sequentially."""
    verdicts = []
    for response in batch:
        with multiprocessing.Manager() as manager:
            verdict = manager.dict()
            process = multiprocessing.Process(target=_check, args=(response.label, _boxed(response.text), verdict))
            process.start()
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
            verdicts.append(verdict.get("correct", False))
    return verdicts


def _boxed(text: str) -> str | None:
    """Return the boxed answer. Extraction is not compared: both variants get the same answer."""
    return extract_answer(text)


# --- ours -----------------------------------------------------------------------------------------------------------


async def as_a_reward(batch: list[Response]) -> list[bool]:
    """Check with `MathReward` and a new grader, so that nothing is cached from the previous round."""
    reward = MathReward(grader=MathGrader(pool=shared_pool()))
    return [result.score == 1.0 for result in await grade_all(reward, batch)]


async def by_workers_alone(batch: list[Response]) -> list[bool]:
    """Check every answer in a worker: no fast path, no cache."""
    grader = MathGrader(pool=shared_pool(), cache_size=0)

    async def one(response: Response) -> bool:
        answer = extract_answer(response.text)
        if answer is None:
            return False
        return (await grader.check(answer, parse_label(response.label))).score == 1.0

    return list(await asyncio.gather(*(one(response) for response in batch)))


def samples(count: int, seed: int) -> list[Response]:
    """Return GSM8K-like answers in the forms that models write; half of them are wrong."""
    rng, batch = random.Random(seed), []
    for _ in range(count):
        gold = rng.randint(1, 2000)
        batch.append(Response(write(gold + rng.choice([0, 0, 1, 7]), rng), str(gold)))
    return batch


async def compare(args: argparse.Namespace) -> None:
    """Print the checks per second of each variant, and the ratios."""
    from math_verify import parse, verify

    verify(*(parse(r"$\frac{1}{2}$", parsing_timeout=None) for _ in range(2)), timeout_seconds=None)  # before the forks
    await by_workers_alone(samples(2 * shared_pool()._num_workers, 99))  # starts the workers
    rates: dict[str, list[float]] = {"process per sample": [], "workers alone": [], "MathReward": []}
    disagreements: list[str] = []
    for round_number in range(args.rounds):
        batch = samples(args.num_checks, round_number)
        slow = batch[: args.num_slow]
        started = time.perf_counter()
        theirs = await asyncio.to_thread(process_per_sample, slow)
        rates["process per sample"].append(len(slow) / (time.perf_counter() - started))
        for name, way in (("workers alone", by_workers_alone), ("MathReward", as_a_reward)):
            started = time.perf_counter()
            ours = await way(batch)
            rates[name].append(len(batch) / (time.perf_counter() - started))
            pairs = zip(slow, theirs, ours[: len(slow)], strict=True)
            disagreements += [f"{name}: {one.text!r} for {one.label}: {b}, not {a}" for one, a, b in pairs if a != b]
    base = statistics.median(rates["process per sample"])
    print("\n| way | checks/s, median | rounds | / process per sample |\n|---|---:|---|---:|")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"| {name} | {median:,.0f} | {', '.join(f'{value:,.0f}' for value in values)} | {median / base:,.0f} |")
    print(f"\nAnswers on which they disagree: {len(disagreements)} of {2 * args.num_slow * args.rounds}")
    print("\n".join(disagreements[:5]))


# --- the loop -------------------------------------------------------------------------------------------------------


def full_load(count: int) -> list[tuple[Reward, list[Response]]]:
    """Return every reward that uses the pool, with its rows and a few hostile ones."""
    from agentenv.rewards.rules.ifeval.reward import IFEvalReward
    from agentenv.rewards.rules.json_schema import JsonSchemaReward
    from agentenv.rewards.rules.regex import RegexReward

    rng = random.Random(0)
    prose = "The quick brown fox. It jumps, and the lazy dog sleeps.\n\n" * 20
    hostile = [Response(r"\boxed{9^{9^{9^9}}}", "5"), Response(r"\boxed{(10^9)!}", "5")]
    follow = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    records = [Response(f'{{"a": {[rng.randrange(99) for _ in range(200)]}}}') for _ in range(count)]
    return [
        (MathReward(grader=MathGrader(pool=shared_pool(), cache_size=0)), samples(4 * count, 7) + hostile),
        (IFEvalReward(), [Response(prose, follow) for _ in range(count)]),
        (RegexReward(pattern=r"(\w+)\s\w+ dog"), [Response(prose) for _ in range(count)]),
        (RegexReward(pattern=r"(a+)+$", cpu_limit_s=0.5), [Response("a" * 40 + "!")]),
        (JsonSchemaReward(schema=schema), records),
    ]


async def lag(args: argparse.Namespace) -> None:
    """Print the delay of a task scheduled every millisecond, idle and under full load."""

    async def note(lags: list[float]) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - started - 0.001)

    idle: list[float] = []
    ticking = asyncio.create_task(note(idle))
    await asyncio.sleep(2.0)
    ticking.cancel()
    load = full_load(args.num_load)
    await asyncio.gather(*(grade_all(reward, rows[:4]) for reward, rows in load))  # starts and loads the workers
    busy: list[float] = []
    ticking = asyncio.create_task(note(busy))
    started = time.perf_counter()
    results = await asyncio.gather(*(grade_all(reward, rows) for reward, rows in load))
    wall_s = time.perf_counter() - started
    ticking.cancel()
    done = [result for one in results for result in one]
    failed = [result.detail for result in done if result.status in (Status.INFRA, Status.LABEL)]
    print(f"\n{len(done)} grades in {wall_s:.1f} s, {len(failed)} of them failed {failed[:2]}")
    print("\n| event loop | p50, ms | p99, ms | max, ms |\n|---|---:|---:|---:|")
    for name, lags in (("idle", sorted(idle)), ("all rewards at once", sorted(busy))):
        p50, p99 = (lags[int(q * (len(lags) - 1))] * 1e3 for q in (0.5, 0.99))
        print(f"| {name} | {p50:.2f} | {p99:.2f} | {lags[-1] * 1e3:.1f} |")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-checks", type=int, default=2000)
    parser.add_argument("--num-slow", type=int, default=40, help="number of them checked in a process each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-load", type=int, default=500, help="rows of each reward while the loop is watched")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of math-verify, which logs at every call without a timeout
    print(machine())
    print(f"Load at the beginning: {os.getloadavg()[0]:.1f}; workers: {shared_pool()._num_workers}")
    await compare(args)
    await lag(args)
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
