"""One slow judge among 64 groups: our group manager against that of RM-Gallery's tutorial for verl.

    python benchmarks/group_rewards.py

Each group's reward is one call of a plain function that waits, as for a judge over HTTP; both managers have the same
functions, threads and deadline. The peer does what the tutorial's `single_compute_score` and `parallel_compute_scores`
say: a thread pool per batch, a deadline from when a call is put into the queue, one `gather` over all groups.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from common import machine

from agentenv.rewards.groups.batch import grade_group
from agentenv.rewards.groups.function import FunctionGroupReward
from agentenv.rewards.types import Response

GROUPS, SAMPLES, THREADS = 64, 4, 8


@dataclass(frozen=True)
class GroupCase:
    """The judges' durations and their deadline."""

    name: str
    usual_s: float
    slow_s: float
    limit_s: float


CASES = (
    GroupCase("no slow judge", 0.05, 0.05, 5.0),
    GroupCase("one slow judge, within its deadline", 0.05, 4.0, 8.0),
    GroupCase("one judge that hangs", 0.05, 12.0, 2.0),
    GroupCase("no slow judge, but a queue longer than the deadline", 0.2, 0.2, 1.0),
)


@dataclass
class Found:
    """When rewards arrived, in seconds from the start."""

    others: int = 0
    """Number of groups with rewards among the 63 whose judge is not slow."""
    others_s: float = 0.0
    """When the last of their rewards arrived."""
    batch_s: float = 0.0
    """When the manager finished."""


def compute_score(prompt: str, responses: list[str], extras: list[dict], case: GroupCase):
    """Wait as long as the group's judge takes."""
    time.sleep(case.slow_s if prompt == "0" else case.usual_s)
    return [1.0] * len(responses), {"comparison_score": [1.0] * len(responses)}


async def peer(case: GroupCase) -> Found:
    """Grade like the tutorial."""
    found, started = Found(), time.perf_counter()

    async def single(executor: ThreadPoolExecutor, prompt: str):
        work = partial(compute_score, prompt=prompt, responses=["x"] * SAMPLES, extras=[{}] * SAMPLES, case=case)
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(executor, work), timeout=case.limit_s)

    try:
        with ThreadPoolExecutor(max_workers=THREADS) as executor:
            results = await asyncio.gather(*(single(executor, str(index)) for index in range(GROUPS)))
        found.others, found.others_s = len(results) - 1, time.perf_counter() - started
    except TimeoutError:
        pass
    found.batch_s = time.perf_counter() - started
    return found


async def ours(case: GroupCase) -> Found:
    """Grade with our manager and the same number of threads."""
    reward = FunctionGroupReward(partial(compute_score, case=case), max_threads=THREADS)
    found, started = Found(), time.perf_counter()

    async def group(prompt: str):
        graded = await grade_group(reward, [Response("x", prompt=prompt)] * SAMPLES, limit_s=case.limit_s)
        if prompt != "0" and graded.status == "ok":
            found.others, found.others_s = found.others + 1, time.perf_counter() - started

    await asyncio.gather(*(group(str(index)) for index in range(GROUPS)))
    found.batch_s = time.perf_counter() - started
    return found


def timed(manager: Callable[[GroupCase], object], case: GroupCase) -> Found:
    """Run in a new event loop."""
    return asyncio.run(manager(case))


def main() -> None:
    print(f"{machine()}\n{GROUPS} groups of {SAMPLES}, {THREADS} threads\n")
    print("| judges | manager | of the other 63, rewarded | there after (s) | against the peer | batch done (s) |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        theirs, mine = timed(peer, case), timed(ours, case)
        never = theirs.others == 0
        ratio = "they never were" if never else f"{theirs.others_s / mine.others_s:.1f}x sooner"
        there = "never" if never else f"{theirs.others_s:.2f}"
        print(f"| {case.name} | the tutorial's | {theirs.others} | {there} | | {theirs.batch_s:.2f} |")
        print(f"| | ours | {mine.others} | {mine.others_s:.2f} | {ratio} | {mine.batch_s:.2f} |")


if __name__ == "__main__":
    main()
