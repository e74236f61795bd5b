"""Time from the cancellation of an execution until the program and its processes have ended.

    python benchmarks/sandbox_cancel.py --count 200

At the levels namespaces and landlock, for programs that sleep, programs that compute, and a tree of processes. The time
is from `cancel` to the end of the cancelled `run`; afterwards the processes below the zygote are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from pathlib import Path

from common import machine

from agentenv.sandbox import Isolation, LocalSandbox, Policy, SandboxUnavailable

PROGRAMS: dict[str, tuple[str, Policy]] = {
    "sleeping": ("import time; time.sleep(60)", "pure"),
    "computing": ("while True: pass", "pure"),
    "tree": ("import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\ntime.sleep(60)", "proc"),
}


def below(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(each) for each in (task / "children").read_text().split()}
    return found.union(*map(below, found))


def lives(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def cancelled(sandbox: LocalSandbox, program: str, policy: Policy, idle: set[int]) -> tuple[float, int]:
    """Return the milliseconds from cancellation to the end, and the number of processes left afterwards."""
    running = asyncio.create_task(sandbox.run(program, policy=policy))
    await asyncio.sleep(0.03)
    mine = below(os.getpid()) - idle
    began = time.perf_counter()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return 1e3 * (time.perf_counter() - began), sum(map(lives, mine))


async def measure(level: Isolation, count: int) -> None:
    """Print a row for each program."""
    async with LocalSandbox(isolation=level) as sandbox:
        await sandbox.run("pass")
        idle = below(os.getpid())
        for name, (program, policy) in PROGRAMS.items():
            results = [await cancelled(sandbox, program, policy, idle) for _ in range(count)]
            times = sorted(each for each, _ in results)
            at = [times[min(int(share * count), count - 1)] for share in (0.5, 0.95, 1.0)]
            within = sum(each <= 10 for each in times) / count
            cells = " | ".join(f"{each:.1f}" for each in at)
            print(f"| {level} | {name} | {cells} | {within:.1%} | {sum(left for _, left in results)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    count = parser.parse_args().count
    print(f"{machine()}; load at the beginning {os.getloadavg()[0]:.1f}\n")
    print("| level | program | p50, ms | p95, ms | max, ms | within 10 ms | alive after |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for level in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        try:
            asyncio.run(measure(level, count))
        except SandboxUnavailable as error:
            print(f"| {level} | not available here: {str(error).splitlines()[0]} | | | | | |")


if __name__ == "__main__":
    main()
