"""Exact and permutation tests of a paired comparison, and their correction for many tasks.

All are symmetric: neither the order of the tasks nor which run comes first changes a p-value. Draws have a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

MAX_EXACT_FLIPS = 20
"""Up to so many tasks that differ, all signs are tried."""
NUM_FLIPS = 10_000
MAX_ARRANGEMENTS = 20_000
"""Up to so many arrangements of a task's episodes, all are tried; beyond, so many are drawn."""
FALSE_SHARE = 0.10
"""Expected share of false ones among the tasks that are named."""
_SEED = 0
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class SignFlips:
    """How often the differences of the tasks would be as far from 0 on average if the sign of each were random."""

    p: float
    num: int
    """Sign patterns that were tried."""
    is_exact: bool
    """True if these are all patterns."""


def sign_flips(differences: Iterable[float]) -> SignFlips:
    """Return the two-sided p-value of a mean of 0, from the difference of each task (or the sum of each cluster).

    Sources: Fisher 1935, The Design of Experiments; Phipson and Smyth 2010 for the 1 that is added to draws.
    """
    values = list(differences)
    sizes = np.array(sorted(abs(value) for value in values if value))  # zeros change no sum
    bound = abs(math.fsum(values)) - _TOLERANCE * float(sizes.sum())
    if len(sizes) <= MAX_EXACT_FLIPS:
        sums = np.zeros(1)
        for size in sizes[:-1]:
            sums = np.concatenate([sums + size, sums - size])
        sums = np.abs(sums + sizes[-1]) if len(sizes) else sums  # the other half has the same sizes
        return SignFlips(float(np.mean(sums >= bound)), 2 ** len(sizes), is_exact=True)
    draws, num_extreme, done = np.random.default_rng(_SEED), 0, 0
    while done < NUM_FLIPS:
        num = min(NUM_FLIPS - done, max(1, 10**7 // len(sizes)))
        signs = draws.integers(0, 2, size=(num, len(sizes)), dtype=np.int8) * 2 - 1
        num_extreme += int(np.sum(np.abs(signs @ sizes) >= bound))
        done += num
    return SignFlips((1 + num_extreme) / (1 + NUM_FLIPS), NUM_FLIPS, is_exact=False)


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Return the exact two-sided p-value of as many gained as lost tasks, with one episode per task in each run.

    Source: McNemar 1947, with the binomial distribution instead of its approximation.
    """
    num = num_gained + num_lost
    logs = (
        math.lgamma(num + 1) - math.lgamma(i + 1) - math.lgamma(num - i + 1) - num * math.log(2)
        for i in range(min(num_gained, num_lost) + 1)
    )
    return min(1.0, 2.0 * math.fsum(map(math.exp, logs)))


def fisher(passed_a: int, num_a: int, passed_b: int, num_b: int) -> float:
    """Return the exact two-sided p-value of equal shares: the probability of all tables that are not more likely.

    Source: Fisher 1935, The Design of Experiments.
    """
    total = passed_a + passed_b
    ways = {
        i: math.comb(num_a, i) * math.comb(num_b, total - i)
        for i in range(max(0, total - num_b), min(num_a, total) + 1)
    }
    return sum(num for num in ways.values() if num <= ways[passed_a]) / math.comb(num_a + num_b, total)


def permutation(values_a: Sequence[float], values_b: Sequence[float]) -> float:
    """Return the two-sided p-value of equal means, from arrangements of the episodes of one task into two groups.

    It is exact for up to `MAX_ARRANGEMENTS`, otherwise from so many draws.
    """
    fewer, more = sorted((values_a, values_b), key=len)
    pooled = np.array(sorted([*fewer, *more]))
    expected = float(pooled.mean()) * len(fewer)
    bound = abs(math.fsum(fewer) - expected) - _TOLERANCE * float(np.abs(pooled).sum())
    chosen = _arrangements(len(pooled), len(fewer))
    num_extreme = int(np.sum(np.abs(chosen @ pooled - expected) >= bound))
    if math.comb(len(pooled), len(fewer)) <= MAX_ARRANGEMENTS:
        return num_extreme / len(chosen)
    return (1 + num_extreme) / (1 + len(chosen))


@lru_cache(maxsize=2)
def _arrangements(num: int, num_chosen: int) -> NDArray[np.float64]:
    """Return rows of `num` zeros and ones, with a one for each chosen: all choices, or draws if there are too many."""
    if math.comb(num, num_chosen) <= MAX_ARRANGEMENTS:
        chosen = np.array(list(combinations(range(num), num_chosen)), dtype=np.int64)
    else:
        draws = np.random.default_rng(_SEED)
        chosen = np.argsort(draws.random((MAX_ARRANGEMENTS, num)), axis=1)[:, :num_chosen]
    rows = np.zeros((len(chosen), num))
    np.put_along_axis(rows, chosen, 1.0, axis=1)
    return rows


def task_p(values_a: Sequence[float], values_b: Sequence[float]) -> float:
    """Return the p-value that a task's values have equal means in both runs: Fisher's exact test for two values."""
    levels = {*values_a, *values_b}
    if len(levels) > 2:
        return permutation(values_a, values_b)
    high = max(levels)
    return fisher(list(values_a).count(high), len(values_a), list(values_b).count(high), len(values_b))


def smallest_p(num_a: int, num_b: int) -> float:
    """Return the smallest p-value that a task with so many episodes can have."""
    return (2.0 if num_a == num_b else 1.0) / math.comb(num_a + num_b, num_a)


def num_needed(num_tasks: int) -> int:
    """Return the smallest number of episodes per run with which one task of `num_tasks` can pass the correction."""
    num = 1
    while smallest_p(num, num) * num_tasks > FALSE_SHARE:
        num += 1
    return num


def benjamini_hochberg(ps: Sequence[float]) -> list[float]:
    """Return the q-value of each p-value: the expected share of false ones if it and all smaller ones are named.

    Source: Benjamini and Hochberg 1995.
    """
    qs, least = [1.0] * len(ps), 1.0
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    for rank in range(len(ps), 0, -1):
        index = order[rank - 1]
        least = min(least, ps[index] * len(ps) / rank)
        qs[index] = least
    return qs
