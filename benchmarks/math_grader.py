r"""Answers per second that `MathGrader` checks, with its fast path and caches and with its workers alone.

    python benchmarks/math_grader.py --num-checks 2000 --workers 2

The answers are GSM8K-like: the gold number in the forms that models write, and a wrong number in half of the checks.
With `--labels gsm8k.jsonl` (rows with `answer: "... #### 42"`) the gold numbers are those of the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

from agentenv.rewards.rules.math.reward import MathGrader, extract_answer, math_outcome, parse_label
from agentenv.rewards.types import RewardResult

FORMS = [
    (30, r"So the total is \boxed{%(n)d}."),
    (10, "#### %(n)d"),
    (10, r"\boxed{%(n)d\text{ apples}}"),
    (10, r"The answer is **\$%(n)d.00**."),
    (5, r"\boxed{%(n)d.0}"),
    (5, r"\boxed{\frac{%(double)d}{2}}"),
    (5, r"\boxed{x = %(n)d}"),
    (5, r"\boxed{%(less)d + 1}"),
    (5, r"\boxed{2 \times %(half)s}"),
    (5, r"\boxed{\sqrt{%(square)d}}"),
    (4, r"\boxed{%(n)d \text{ or } %(more)d}"),
    (3, r"\boxed{\text{about %(n)d}}"),
    (3, r"I think it is %(n)d, but I am not sure"),
]


def write(number: int, rng: random.Random) -> str:
    weights, forms = zip(*FORMS, strict=True)
    values = {"n": number, "double": 2 * number, "less": number - 1, "more": number + 1, "square": number * number}
    return rng.choices(forms, weights)[0] % {**values, "half": number / 2}


def gold_numbers(path: Path | None, rng: random.Random) -> list[int]:
    if path is None:
        return [rng.randint(1, 2000) for _ in range(1000)]
    rows = [json.loads(line)["answer"].rpartition("####")[2].replace(",", "") for line in path.open()]
    return [int(row) for row in rows if row.strip().isdigit()]


async def measure(name: str, checks: list[tuple[str, str]], args: argparse.Namespace, *, workers_alone: bool) -> None:
    latencies: list[float] = []
    queue = iter(checks)
    results: list[RewardResult] = []

    async def caller() -> None:
        for text, label in queue:
            started = time.perf_counter()
            if not workers_alone:
                results.append(await grader.grade(text, label))
            elif (answer := extract_answer(text)) is not None:
                results.append(await grader.check(answer, parse_label(label)))
            latencies.append(time.perf_counter() - started)

    async with MathGrader(num_workers=args.workers, cache_size=0 if workers_alone else 4096) as grader:
        await asyncio.gather(*(grader.check("x", (str(n),)) for n in range(args.workers)))  # starts the workers
        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(args.concurrency)))
        wall_s = time.perf_counter() - started
    latencies.sort()
    p50, p99 = (latencies[int(q * (len(latencies) - 1))] * 1e3 for q in (0.5, 0.99))
    rate = len(results) / wall_s
    print(f"{name:24} {rate:8.0f} checks/s   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   ({args.concurrency} at a time)")
    print(f"{'':24} {dict(Counter(math_outcome(result) for result in results))}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-checks", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--labels", type=Path, help="a JSON-lines file with GSM8K's `answer` column")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    golds = gold_numbers(args.labels, rng)
    checks = []
    for _ in range(args.num_checks):
        gold = rng.choice(golds)
        checks.append((write(gold + rng.choice([0, 0, 1, 7]), rng), str(gold)))
    await measure("fast path and caches", checks, args, workers_alone=False)
    await measure("workers alone", checks, args, workers_alone=True)


if __name__ == "__main__":
    asyncio.run(main())
