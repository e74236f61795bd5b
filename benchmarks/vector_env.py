"""64 environments in one vector: agentenv's (one event loop), gymnasium's processes and gymnasium's serial vector.

    python benchmarks/vector_env.py

All use the same environments, seeds, actions and SAME_STEP; all must return the same rewards. `waits` awaits 50 to
200 ms per step, as the client of a sandbox or of a grader does; `quick` is guess_number, microseconds of Python;
`computes` holds the interpreter for 5 ms, which one process cannot do twice at once: its class says `cpu_bound =
True`, so agentenv's default is one process per core. `start` is the constructor and the first reset; memory is the
proportional set size of the process and its children together, after the last step. GEM's thread pool, if gem-llm
is installed (or AGENTENV_GEM names a folder with it), waits in an environment with GEM's own interface that does
nothing else; its memory includes the import. Processes are forked, gymnasium's default on Linux, which is cheaper
than spawning.
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

from agentenv import AgentInstance, StepResult, rollout
from agentenv.engines.scripted import PlainTextTokenizer, ScriptedEngine
from agentenv.gym.env import AgentEnv
from agentenv.gym.vector import AgentVectorEnv

NUM_TURNS, WAIT_S, WORK_S = 4, (0.05, 0.2), 0.005
DATA = "guess_number"


def wait_s(seed: Any, turn: int) -> float:
    """Return how long a step waits."""
    return Random(f"{seed}/{turn}").uniform(*WAIT_S)


class Waits(AgentInstance):
    """Waits in every step."""

    needs_label = False

    async def step(self, states: Any) -> StepResult:
        """Wait."""
        import asyncio

        await asyncio.sleep(wait_s(states["seed"], states["turn_index"]))
        return StepResult("Continue.", reward=1.0, terminated=states["turn_index"] + 1 == NUM_TURNS)


class Computes(AgentInstance):
    """Computes in every step, in pure Python."""

    needs_label = False
    cpu_bound = True

    def __init__(self, work_s: float = WORK_S) -> None:
        """Set the seconds of CPU time that a step takes."""
        self.work_s = work_s

    def step(self, states: Any) -> StepResult:
        """Compute."""
        started, number = time.thread_time(), 0
        while time.thread_time() - started < self.work_s:
            for _ in range(1000):
                number = (number * 31 + 7) % 1_000_003
        return StepResult("Continue.", reward=1.0, terminated=states["turn_index"] + 1 == NUM_TURNS)


def memory_mib() -> float:
    """Return the proportional set size of this process and its children."""
    own = os.getpid()
    children = [int(pid) for each in Path(f"/proc/{own}/task").glob("*/children") for pid in each.read_text().split()]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in [own, *children]]
    return sum(int(line.split()[1]) for text in rollups for line in text.splitlines() if line.startswith("Pss:")) / 1024


def gem_vector(num: int) -> Callable[[], Any] | None:
    """Return a constructor of GEM's thread pool over waiting environments; None if GEM is not installed."""
    sys.path.append(os.environ.get("AGENTENV_GEM", str(Path(sys.prefix) / "gem")))
    try:
        from gem.core import Env
        from gem.vector.async_vector_env import AsyncVectorEnv as ThreadPoolEnv
    except ImportError:
        return None

    class GemWaits(Env):  # type: ignore[misc]
        """Waits like Waits."""

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
            return "Continue.", 1.0, self.turn == NUM_TURNS, False, {}

        def sample_random_action(self) -> str:
            """Nothing."""
            return ""

    return lambda: ThreadPoolEnv([""] * num, [partial(GemWaits, index) for index in range(num)])


def ways(env: str, num: int) -> dict[str, Callable[[], Any]]:
    """Return the constructor of each vector by name."""
    make, mode = partial(AgentEnv, env, data=DATA), AutoresetMode.SAME_STEP
    one_loop = partial(AgentVectorEnv, env, num_envs=num, data=DATA, env_actors=0)
    return {
        "agentenv": lambda: AgentVectorEnv(env, num_envs=num, data=DATA),
        **({"agentenv, one loop": one_loop} if env.endswith(":Computes") else {}),
        "gymnasium, processes": lambda: AsyncVectorEnv([make] * num, shared_memory=False, autoreset_mode=mode),
        "gymnasium, serial": lambda: SyncVectorEnv([make] * num, autoreset_mode=mode),
    }


def measure(make: Callable[[], Any], num: int, steps: int) -> tuple[float, float, float, list[list[float]]]:
    """Return the start in seconds, the median step in seconds, memory in MiB, and the rewards."""
    started = time.perf_counter()
    envs = make()
    envs.reset(seed=0)
    start_s, took_s, rewards = time.perf_counter() - started, [], []
    for turn in range(steps):
        started = time.perf_counter()
        given = envs.step([str((5 * turn) % 15 + 1)] * num)
        took_s.append(time.perf_counter() - started)
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
    base = found["agentenv"]
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


def compare_runs(env: str, num: int) -> None:
    """Print how long `agentenv run` takes for episodes that compute 50 ms in each step, start-up left out."""
    engine = ScriptedEngine(["5"], PlainTextTokenizer())
    print("| run | seconds | episodes/s |\n|---|---:|---:|")
    for name, env_actors in (("processes", None), ("one loop", 0)):
        kwargs = {"work_s": 0.05}
        run = rollout(env, DATA, engine=engine, limit=num, env_kwargs=kwargs, env_actors=env_actors, progress="none")
        time_spent = run.metrics.time
        print(f"| {name} | {time_spent.wall_s:.2f} | {num / time_spent.wall_s:.1f} |", flush=True)


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
    compare_runs(f"{here}:Computes", options.num_envs)


if __name__ == "__main__":
    main()
