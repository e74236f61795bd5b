"""64 environments in one vector: agentenv's (one event loop) beside gymnasium's processes and its serial vector.

    python benchmarks/vector_env.py

The same environments, seeds and actions under all, SAME_STEP; every way must give the same rewards. `waits` awaits 50
to 200 ms per step, as the client of a sandbox or of a grader does; `quick` is guess_number, microseconds of Python;
`computes` holds the interpreter for 5 ms, which one process cannot do twice at once. `start` is the constructor and the
first reset; memory is the proportional set size of the process and its children together, after the last step. GEM's
thread pool, where gem-llm is installed (or AGENTENV_GEM names a folder with it), waits in an environment of its own
interface that does nothing else; its memory has that of importing it. Processes are forked, gymnasium's default on
Linux: cheaper than spawned ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from common import machine
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from agentenv import AgentInstance, StepResult
from agentenv.gym.env import AgentEnv
from agentenv.gym.vector import AgentVectorEnv

NUM_TURNS, WAIT_S, WORK_S = 4, (0.05, 0.2), 0.005
DATA = "guess_number"


def wait_s(seed: Any, turn: int) -> float:
    """How long a step waits."""
    return Random(f"{seed}/{turn}").uniform(*WAIT_S)


class Waits(AgentInstance):
    """Waits in every step."""

    needs_label = False

    async def step(self, states: Any) -> StepResult:
        """Wait."""
        import asyncio

        await asyncio.sleep(wait_s(states["seed"], states["turn_index"]))
        return StepResult("Go on.", reward=1.0, terminated=states["turn_index"] + 1 == NUM_TURNS)


class Computes(AgentInstance):
    """Computes in every step, in pure Python."""

    needs_label = False

    def step(self, states: Any) -> StepResult:
        """Compute."""
        begun, number = time.thread_time(), 0
        while time.thread_time() - begun < WORK_S:
            for _ in range(1000):
                number = (number * 31 + 7) % 1_000_003
        return StepResult("Go on.", reward=1.0, terminated=states["turn_index"] + 1 == NUM_TURNS)


def memory_mib() -> float:
    """Proportional set size of this process and its children."""
    own = os.getpid()
    children = [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in [own, *children]]
    return sum(int(line.split()[1]) for text in rollups for line in text.splitlines() if line.startswith("Pss:")) / 1024


def gem_vector(num: int) -> Callable[[], Any] | None:
    """What makes GEM's thread pool over environments that wait; None where GEM is not installed."""
    sys.path.append(os.environ.get("AGENTENV_GEM", str(Path(sys.prefix) / "gem")))
    try:
        from gem.core import Env
        from gem.vector.async_vector_env import AsyncVectorEnv as ThreadPoolEnv
    except ImportError:
        return None

    class GemWaits(Env):  # type: ignore[misc]
        """Waits as Waits does."""

        def __init__(self, seed: int) -> None:
            self.seed, self.turn = seed, 0

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            """Begin."""
            self.turn = 0
            return "Go.", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            """Wait."""
            time.sleep(wait_s(self.seed, self.turn))
            self.turn += 1
            return "Go on.", 1.0, self.turn == NUM_TURNS, False, {}

        def sample_random_action(self) -> str:
            """Nothing."""
            return ""

    return lambda: ThreadPoolEnv([""] * num, [partial(GemWaits, index) for index in range(num)])


def ways(env: str, num: int) -> dict[str, Callable[[], Any]]:
    """What makes each vector."""
    make, mode = partial(AgentEnv, env, data=DATA), AutoresetMode.SAME_STEP
    return {
        "agentenv, one loop": lambda: AgentVectorEnv(env, num_envs=num, data=DATA),
        "gymnasium, processes": lambda: AsyncVectorEnv([make] * num, shared_memory=False, autoreset_mode=mode),
        "gymnasium, serial": lambda: SyncVectorEnv([make] * num, autoreset_mode=mode),
    }


def measure(make: Callable[[], Any], num: int, steps: int) -> tuple[float, float, float, list[list[float]]]:
    """Seconds of the start, median seconds of a step, memory in MiB, and the rewards."""
    begun = time.perf_counter()
    envs = make()
    envs.reset(seed=0)
    start_s, took_s, rewards = time.perf_counter() - begun, [], []
    for turn in range(steps):
        begun = time.perf_counter()
        given = envs.step([str((5 * turn) % 15 + 1)] * num)
        took_s.append(time.perf_counter() - begun)
        rewards.append(given[1].tolist())
    memory = memory_mib()
    getattr(envs, "close", lambda: None)()
    return start_s, statistics.median(took_s), memory, rewards


def compare(name: str, env: str, options: argparse.Namespace) -> None:
    """Print a table of one kind of environment."""
    made, found = ways(env, options.num_envs), {}
    if name == "waits":
        gem = gem_vector(options.num_envs)
        made |= {} if gem is None else {"GEM, thread pool": gem}
        if gem is None:
            print(f"without GEM: pip install --no-deps --target {sys.prefix}/gem gem-llm==0.1.0\n")
    for way, make in made.items():
        steps = options.serial_steps if "serial" in way and name == "waits" else options.steps
        found[way] = measure(make, options.num_envs, steps)
    base = found["agentenv, one loop"]
    for way, (_, _, _, rewards) in found.items():
        if any(one != other for one, other in zip(rewards, base[3], strict=False)):
            raise SystemExit(f"{name}: {way} gave other rewards: it did not do the same work")
    print(
        "| environment | vector | start, s | step, s | step / agentenv's | memory, MiB |\n|---|---|---:|---:|---:|---:|"
    )
    for way, (start_s, step_s, memory, _) in found.items():
        figures = f"{start_s:.2f} | {step_s:.4f} | {step_s / base[1]:.2f} | {memory:.0f}"
        print(f"| {name} | {way} | {figures} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--serial_steps", type=int, default=2, help="of the serial vector over environments that wait")
    options = parser.parse_args()
    print(f"{machine()}\n\n{options.num_envs} environments\n", flush=True)
    here = Path(__file__).resolve()
    compare("quick", "guess_number", options)
    compare("computes", f"{here}:Computes", options)
    compare("waits", f"{here}:Waits", options)


if __name__ == "__main__":
    main()
