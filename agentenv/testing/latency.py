"""Latencies for simulations: each draws seconds from a seed and the request only.

Give them to `ScriptedEngine(latency_s=…)` for generations and to `simulate(env_latency_s=…)` for environments. The same
seed and request result in the same seconds on every machine and in every order.

Example:
    >>> slow = lognormal(2.0, seed=7)
    >>> slow("task/0/1") == slow("task/0/1"), slow("task/0/1") == slow("task/0/2")
    (True, False)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from agentenv.engines.scripted import Request

Drawn = Callable[[Request | str], float]
"""Seconds for a request of an engine, or for a key: `episode/turn`."""


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


def exponential(mean_s: float, *, seed: int = 0) -> Drawn:
    """Return exponential latencies, as of a memoryless service; one in a hundred is over 4.6 times the mean.

    Raises:
        ValueError: a number is out of range.
    """
    _check("exponential", mean_s=mean_s)
    return lambda key: -mean_s * math.log(1.0 - _random(key, seed).random())


def uniform(low_s: float, high_s: float, *, seed: int = 0) -> Drawn:
    """Return latencies that are uniform between the two.

    Raises:
        ValueError: a number is out of range.
    """
    _check("uniform", low_s=low_s, high_s=high_s)
    return lambda key: _random(key, seed).uniform(low_s, high_s)


def _random(key: Request | str, seed: int) -> random.Random:
    name = key if isinstance(key, str) else f"{key.request_id}/{key.sampling.seed}"
    return random.Random(f"{seed}/{name}")


def _check(where: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{where}.{name}: expected a number >= 0, got {value!r}. Change it.")
