"""Executions per second and latency of the same programs in the sandbox, in plain processes and in pytest.

    python benchmarks/sandbox.py

The program is one file with a function and its test. Every way executes it as `__main__`, except pytest, which imports
it and calls the test. The ways alternate:

- `LocalSandbox`: each available level, and `grade` of the same function by a FunctionSuite with the same values, a
  verdict that the program cannot forge;
- `pytest`: the seed's code-generation reward, which writes the file and runs `python -m pytest FILE`; with and without
  the installed plugins;
- `python -I -S`: a new interpreter without isolation;
- `bwrap`: such an interpreter in bubblewrap with all namespaces separate, if bubblewrap is installed.

Then a program that imports numpy, with `LocalSandbox(preimport=("numpy",))`. All ways use the same interpreter. Latency
is measured sequentially, and throughput with one program per core, for the peers from threads. Sandboxed programs run
at a niceness 10 above their parent's. This benchmark runs at 19, the maximum, so that other work on the machine slows
all ways equally.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common import machine

from agentenv.sandbox import ExecStatus, Isolation, LocalSandbox, SandboxUnavailable
from agentenv.sandbox.grading import FunctionSuite, FunctionTest, grade

CASES = (([3, 1, 2], [1, 2, 3]), ([], []), ([5, 5, 1], [1, 5, 5]))
SOLUTION = """
def order(values):
    if len(values) < 2:
        return values
    pivot, *rest = values
    return order([v for v in rest if v < pivot]) + [pivot] + order([v for v in rest if v >= pivot])
"""
PLAIN = f"""{SOLUTION}

def test_order():
    for given, expected in {CASES!r}:
        assert order(given) == expected

if __name__ == "__main__":
    test_order()
    print("passed")
"""
NUMPY = """
import numpy as np
assert (np.arange(6).reshape(2, 3) @ np.ones(3)).tolist() == [3.0, 12.0]
print("passed")
"""
SUITE = FunctionSuite("order", hidden=tuple(FunctionTest((given,), expected) for given, expected in CASES))
LEVELS = (Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.UID)
PYTHON = os.path.realpath(sys.executable)
CORES = len(os.sched_getaffinity(0))
TIMEOUT_S = 60
AS_ROOT = os.geteuid() == 0


@dataclass
class Way:
    """One way to run the program, and how long it took."""

    name: str
    once: Callable[[], Awaitable[None]]
    """Run it; raise SystemExit if it did not end as expected."""
    per_round: int = 10
    """Number of runs in a round of latencies: fewer for slow variants."""
    times_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def p50_ms(self) -> float:
        return 1e3 * statistics.median(self.times_s)

    @property
    def p95_ms(self) -> float:
        return 1e3 * sorted(self.times_s)[int(0.95 * len(self.times_s))]

    @property
    def per_s(self) -> float:
        return statistics.median(self.rates)


# --- ours ---------------------------------------------------------------------------------------------------------


async def run_in(sandbox: LocalSandbox, program: str) -> None:
    result = await sandbox.run(program)
    if (result.status, result.stdout) != (ExecStatus.OK, "passed\n"):
        raise SystemExit(f"{sandbox.isolation}: {result.status}, {result.detail or result.stderr[-300:]}")


async def grade_in(sandbox: LocalSandbox) -> None:
    result = await grade(sandbox, SOLUTION, SUITE)
    if result.score != 1.0:
        raise SystemExit(f"grade: {result.infra_detail or result.tests}")


async def sandboxes(stack: contextlib.AsyncExitStack, preimport: tuple[str, ...] = ()) -> list[LocalSandbox]:
    """Open a sandbox at each available level."""
    found = []
    for level in LEVELS:
        try:
            found.append(await stack.enter_async_context(LocalSandbox(isolation=level, preimport=preimport)))
        except SandboxUnavailable:
            print(f"LocalSandbox, {level}: not available here\n")
    if not found:
        raise SystemExit("LocalSandbox: no level is available here; see `agentenv sandbox doctor`")
    return found


# --- the peers ----------------------------------------------------------------------------------------------------


def process(command: Sequence[str], env: dict[str, str] | None) -> None:
    """Run a command, which must print "passed"."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False)
    if done.returncode or "passed" not in done.stdout:
        raise SystemExit(f"{command[0]}: exit code {done.returncode}, {done.stdout[-500:]}{done.stderr[-500:]}")


def pytest_run(program: str, env: dict[str, str] | None) -> None:
    """Run pytest as the seed's reward function does: a file per sample, and a separate process."""
    with tempfile.NamedTemporaryFile(mode="w", suffix=".py", delete=False) as file:
        file.write(program)
    try:
        process([sys.executable, "-m", "pytest", file.name], env)
    finally:
        os.remove(file.name)


def bwrap_command() -> list[str]:
    """Return the command for python in bubblewrap with all namespaces, no capabilities and a clean environment."""
    shown = {"/usr", *(str(Path(base).resolve()) for base in (sys.base_prefix, sys.prefix))}
    place = ["--tmpfs", "/tmp", "--chdir", "/tmp"]  # before the others: an environment may lie below it
    binds = [word for path in sorted(shown) for word in ("--ro-bind", path, path)]
    links = [
        word
        for name in ("lib", "lib64", "bin")
        if os.path.islink(f"/{name}")
        for word in ("--symlink", f"usr/{name}", f"/{name}")
    ]
    guard = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    return ["bwrap", *guard, *place, *binds, *links, PYTHON, "-I", "-S", "-c"]


def in_thread(pool: ThreadPoolExecutor, call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def once() -> None:
        await asyncio.get_running_loop().run_in_executor(pool, call)

    return once


def cold_ways(pool: ThreadPoolExecutor, program: str, per_round: int) -> list[Way]:
    """Return the ways with a new interpreter per program, plain and in bubblewrap."""
    ways = {"`python -I -S`, no isolation": [PYTHON, "-I", "-S", "-c", program]}
    if shutil.which("bwrap"):
        ways["bwrap + `python -I -S`"] = [*bwrap_command(), program]
    else:
        print("bwrap: not installed\n")
    return [
        Way(name, in_thread(pool, functools.partial(process, command, None)), per_round)
        for name, command in ways.items()
    ]


# --- measuring ----------------------------------------------------------------------------------------------------


async def latencies(ways: Sequence[Way], rounds: int) -> None:
    """Measure latencies sequentially; the variants alternate."""
    for _ in range(rounds):
        for way in ways:
            for _ in range(way.per_round):
                started = time.perf_counter()
                await way.once()
                way.times_s.append(time.perf_counter() - started)


async def rates(ways: Sequence[Way], rounds: int, seconds: float) -> None:
    """Measure throughput with one program per core; the variants alternate."""

    async def repeat(way: Way, end: float) -> int:
        count = 0
        while not count or time.perf_counter() < end:
            await way.once()
            count += 1
        return count

    for _ in range(rounds):
        for way in ways:
            started = time.perf_counter()
            counts = await asyncio.gather(*(repeat(way, started + seconds) for _ in range(CORES)))
            way.rates.append(sum(counts) / (time.perf_counter() - started))


def table(ways: Sequence[Way], ours: Sequence[Way]) -> str:
    """Return each variant, and the executions per second of each of our levels relative to it."""
    head = ["way", "p50, ms", "p95, ms", "executions/s", *(f"{way.name.split()[-1]} / it" for way in ours)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for way in ways:
        ratios = [f"{our.per_s / way.per_s:.2f}" for our in ours]
        cells = [
            way.name,
            f"{way.p50_ms:.1f}",
            f"{way.p95_ms:.1f}",
            f"{way.per_s:,.{0 if way.per_s >= 10 else 1}f}",
            *ratios,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


async def measure(ways: Sequence[Way], options: argparse.Namespace) -> None:
    for way in ways:
        await way.once()  # fills caches, and shows that it does the same
    await latencies(ways, options.rounds)
    await rates(ways, options.rate_rounds, options.seconds)


async def plain(pool: ThreadPoolExecutor, options: argparse.Namespace) -> dict[str, float]:
    """Measure the program and its test in every way; the goals refer to these figures."""
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    async with contextlib.AsyncExitStack() as stack:
        found = await sandboxes(stack)
        ours = [Way(f"LocalSandbox, {box.isolation}", functools.partial(run_in, box, PLAIN)) for box in found]
        grading = Way(f"`grade`, {found[0].isolation}", functools.partial(grade_in, found[0]))
        seed = Way("`python -m pytest` (the seed's)", in_thread(pool, functools.partial(pytest_run, PLAIN, None)), 1)
        no_plugins = Way("the same, no plugins", in_thread(pool, functools.partial(pytest_run, PLAIN, bare)), 1)
        cold = cold_ways(pool, PLAIN, 5)
        ways = [*ours, grading, seed, no_plugins, *cold]
        await measure(ways, options)
    print(f"A function and its test, as {'root' if AS_ROOT else 'a plain user'}:\n\n{table(ways, ours)}\n")
    bwrap = next((ours[0].per_s / way.per_s for way in cold if way.name.startswith("bwrap")), None)
    figures = {"pytest": ours[0].per_s / seed.per_s, "p50_ms": ours[0].p50_ms}
    return figures if bwrap is None else {**figures, "bwrap": bwrap}


async def with_numpy(pool: ThreadPoolExecutor, options: argparse.Namespace) -> dict[str, float]:
    """Measure a program that imports numpy, which only the sandbox imports in advance."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        print("numpy: not installed\n")
        return {}
    packages = str(Path(spec.origin).parents[1])
    async with contextlib.AsyncExitStack() as stack:
        found = await sandboxes(stack, ("numpy",))
        ours = [Way(f"LocalSandbox, {box.isolation}", functools.partial(run_in, box, NUMPY)) for box in found]
        cold = cold_ways(pool, f"import sys; sys.path.append({packages!r})\n{NUMPY}", 1)
        ways = [*ours, *cold]
        await measure(ways, options)
    print(f"A program that imports numpy:\n\n{table(ways, ours)}\n")
    return {"numpy": ours[0].per_s / cold[0].per_s}


GOALS = {
    "pytest": ("executions/s, times the seed's pytest", 20.0, True),
    "bwrap": ("executions/s, times bwrap with a new interpreter", 2.5, True),
    "numpy": ("executions/s with numpy, times a new interpreter", 15.0, True),
    "p50_ms": ("p50 of the strongest level, ms", 6.0, False),
}


async def run(options: argparse.Namespace) -> None:
    with ThreadPoolExecutor(CORES) as pool:
        figures = await plain(pool, options)
        figures |= await with_numpy(pool, options)
    print("| goal | wanted | found | |\n|---|---:|---:|---|")
    for key, (name, bound, at_least) in GOALS.items():
        if key in figures:
            met = figures[key] >= bound if at_least else figures[key] <= bound
            print(
                f"| {name} | {'≥' if at_least else '≤'} {bound:g} | {figures[key]:.1f} | {'met' if met else 'missed'} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of latencies: 10 of ours, 5 cold, 1 of pytest each")
    parser.add_argument("--rate_rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way in a round of executions a second")
    parser.add_argument("--small", action="store_true", help="few of each, as a smoke test")
    options = parser.parse_args()
    if options.small:
        options.rounds, options.rate_rounds, options.seconds = 2, 1, 0.5
    os.nice(19)
    load = os.getloadavg()[0]
    print(f"{machine()}; load at the beginning {load:.1f}\n", flush=True)
    started = time.perf_counter()
    asyncio.run(run(options))
    print(f"\nload at the end {os.getloadavg()[0]:.1f}, after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
