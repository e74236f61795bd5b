"""simulate: a whole run in virtual time with the real runner, and its duration and utilization; latencies.

A latency draws seconds from a seed and the request only: the same on every machine and in every order. Give it to
`ScriptedEngine(latency_s=…)` for generations and to `simulate(env_latency_s=…)` for environments.

Example:
    >>> setup = Setup("guess_number", ScriptedEngine(["8"], latency_s=lognormal(2.0)))
    >>> simulation = simulate(setup, num_tasks=15, num_samples=8, concurrency=32, env_latency_s=lognormal(0.5))
    >>> assert simulation.elapsed_s < 600 and simulation.utilization > 0.5
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentenv._util.calls import call, create
from agentenv.core.agent import AgentInstance
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, SamplingParams, Task
from agentenv.engines.scripted import Request
from agentenv.episode.loop import Episode
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource, EpisodeSource
from agentenv.errors import ConfigError
from agentenv.testing.clock import VirtualClock
from agentenv.testing.episodes import Setup, play_all

EnvLatency = float | Callable[[str], float]
"""Seconds of a step of the environment, or a function that returns them for `episode/turn`."""
Drawn = Callable[[Request | str], float]
"""Seconds for a request of an engine, or for a key: `episode/turn`."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulated run."""

    trajectories: tuple[Trajectory, ...]
    """In the order of tasks and samples."""
    durations_s: tuple[float, ...]
    """Virtual seconds of each episode, in the same order."""
    elapsed_s: float
    """Virtual seconds of the run."""
    generating_s: float
    """Virtual seconds of all generations together."""
    concurrency: int
    num_generations: int
    wall_s: float
    """Real seconds that the simulation took."""

    @property
    def mean_generating(self) -> float:
        """Generations in flight, on average over the run."""
        return self.generating_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def utilization(self) -> float:
        """Share of the places for episodes in which a generation was running, on average over the run: 0 to 1."""
        return self.mean_generating / self.concurrency

    def duration_s(self, quantile: float) -> float:
        """Return the virtual seconds of an episode at this quantile (0 to 1): 0.5 is the median, 1.0 the longest."""
        ordered = sorted(self.durations_s)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def simulate(
    setup: Setup,
    *,
    num_tasks: int | None = None,
    num_samples: int = 1,
    concurrency: int = 64,
    env_latency_s: EnvLatency = 0.0,
    clock: VirtualClock | None = None,
) -> Simulation:
    """Run episodes in virtual time. Equal setups return equal simulations, except for `wall_s`.

    Latencies of generations are the engine's (`ScriptedEngine(latency_s=…)`), those of steps `env_latency_s`. Real
    computation (an environment, its graders) takes real time and no virtual time.

    Args:
        setup: the episodes to run.
        num_tasks: number of tasks; None for all.
        num_samples: episodes of each task.
        concurrency: episodes at one time.
        env_latency_s: latency to add to every step of the environment.
        clock: the clock to run on; None for a new one.

    Raises:
        ConfigError: the setup cannot be run.
    """
    meter, own = _Meter(setup.engine()), clock or VirtualClock()
    source = _Timed(setup.source(), env_latency_s)
    began, began_s = time.perf_counter(), own.elapsed_s
    tasks = setup.tasks(num_tasks)  # in messages, or as the class gets them
    ready = replace(setup, env=source, policy=meter, data=tasks, as_messages=False, limits=setup.episode_limits())
    try:
        found = own.run(play_all(ready, num_samples=num_samples, concurrency=concurrency))
        elapsed_s = own.elapsed_s - began_s
    finally:
        if clock is None:
            own.close()
    return Simulation(
        tuple(found), tuple(source.durations_s[one.episode_id] for one in found), elapsed_s, meter.generating_s,
        concurrency, meter.num, time.perf_counter() - began,
    )  # fmt: skip


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Meter(Engine):
    """An engine that measures how long another one is busy."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.tokenizer = engine, getattr(engine, "tokenizer", None)
        self.num, self.generating_s = 0, 0.0

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Generate with the engine; see `core.engine.Engine`."""
        began = _now()
        self.num += 1
        try:
            return await self._engine.generate(prompt_token_ids, sampling, request_id=request_id)
        finally:
            self.generating_s += _now() - began


class _Timed:
    """A source that adds a latency to steps, and measures the duration of its episodes."""

    def __init__(self, source: EpisodeSource, latency_s: EnvLatency) -> None:
        if latency_s != 0.0 and not isinstance(source, EnvSource):
            raise ConfigError(f"simulate: expected an environment with `step`, got {source!r:.80}. Drop env_latency_s.")
        self._source, self._latency_s = source, latency_s
        self.durations_s: dict[str, float] = {}

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `Episode.run`."""
        began = _now()
        if isinstance(self._source, EnvSource) and self._latency_s != 0.0:
            make = partial(self._slowed, self._source, key.episode_id)
            trajectory = await Episode(task, setup, key).run(make)
        else:
            trajectory = await self._source.run(task, setup, key)
        self.durations_s[key.episode_id] = _now() - began
        return trajectory

    async def _slowed(self, source: EnvSource, episode_id: str) -> AgentInstance:
        """Return an environment whose `step` starts with the latency."""
        agent = await create(source.cls, source.kwargs)
        step, latency_s = agent.step, self._latency_s

        async def slowed_step(states: Any) -> Any:
            key = f"{episode_id}/{states['turn_index']}"
            await asyncio.sleep(latency_s(key) if callable(latency_s) else latency_s)
            return await call(step, states)

        agent.step = slowed_step  # type: ignore[method-assign]
        return agent


def lognormal(median_s: float, sigma: float = 0.5, *, seed: int = 0) -> Drawn:
    """Return lognormal latencies with this median.

    With `sigma` 0.5 one in a hundred is over 3.2 times the median, with 1.0 over 10 times.

    Raises:
        ValueError: a number is out of range.
    """
    _check("lognormal", median_s=median_s, sigma=sigma)
    if median_s == 0:
        return lambda key: 0.0
    return lambda key: _random(key, seed).lognormvariate(math.log(median_s), sigma)


def _random(key: Request | str, seed: int) -> random.Random:
    name = key if isinstance(key, str) else f"{key.request_id}/{key.sampling.seed}"
    return random.Random(f"{seed}/{name}")


def _check(where: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{where}.{name}: expected a number >= 0, got {value!r}.")
