"""Simulate comparisons of two runs, and count how often each test finds a difference, where there is one or none.

    python benchmarks/paired_differences.py --repeats 3000

A task passes in A with probability p ~ Beta(.5, .5); in B its logit is shifted by N(mu, sigma). Each task has k
episodes in each run. With mu = 0 the runs are equal on average over tasks, so a test of size 5 % finds a difference in
5 of 100.
`paired t` and `sign flips` are those of `agentenv diff`; the other columns are what one might do instead:

    paired z       1.96 instead of Student's quantile
    bootstrap      percentile interval of 1,000 resamples of the tasks
    unpaired t     the tasks' means as two independent groups
    z episodes     all episodes as independent
    McNemar        of the tasks that most episodes solve

The second table has clusters of 5 tasks that share half of the variance of the shift. The third has the share of
comparisons that find a difference as large as the smallest effect that `agentenv diff` names, on average.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from common import machine
from numpy.typing import NDArray

from agentenv._util.estimates import student_t
from agentenv.compare.intervals import paired_difference, smallest_effect, verdict_of
from agentenv.compare.significance import mcnemar, sign_flips

CASES = (
    (5, 8, 0.0, 1.0), (10, 8, 0.0, 1.0), (20, 8, 0.0, 1.0), (50, 8, 0.0, 1.0), (200, 4, 0.0, 1.0), (50, 8, 0.7, 0.5),
    (20, 8, 0.7, 0.5),
)  # fmt: skip
"""Tasks, episodes per task, mean and standard deviation of the shift."""
COLUMNS = ("paired t", "paired z", "bootstrap", "sign flips", "unpaired t", "z episodes", "McNemar")
CLUSTER = 5
ALPHA = 0.05
Z = 1.959963984540054


def passes(draws: np.random.Generator, shift: NDArray[np.float64], k: int) -> tuple[NDArray, NDArray]:
    """Return how many of k episodes pass in A and in B, for tasks whose logits are shifted."""
    p = np.clip(draws.beta(0.5, 0.5, len(shift)), 1e-9, 1 - 1e-9)
    q = 1.0 / (1.0 + (1.0 / p - 1.0) * np.exp(-shift))
    return draws.binomial(k, p), draws.binomial(k, q)


def findings(draws: np.random.Generator, a: NDArray, b: NDArray, k: int) -> list[bool]:
    """Return whether each test finds a difference."""
    d = (b - a) / k
    num = len(d)
    found = paired_difference(list(d))
    se = found.se or 0.0
    resampled = d[draws.integers(0, num, (1000, num))].mean(axis=1)
    low, high = np.quantile(resampled, [ALPHA / 2, 1 - ALPHA / 2])
    se_unpaired = np.sqrt((np.var(a / k, ddof=1) + np.var(b / k, ddof=1)) / num)
    share_a, share_b = a.mean() / k, b.mean() / k
    se_episodes = np.sqrt((share_a * (1 - share_a) + share_b * (1 - share_b)) / (num * k))
    solved_a, solved_b = 2 * a > k, 2 * b > k
    gained, lost = int(np.sum(~solved_a & solved_b)), int(np.sum(solved_a & ~solved_b))
    return [
        verdict_of(found) in ("better", "worse"),
        abs(found.mean) > Z * se,
        bool(low > 0.0 or high < 0.0),
        sign_flips(list(d)).p <= ALPHA,
        abs(found.mean) > student_t(2 * num - 2) * se_unpaired,
        abs(found.mean) > Z * se_episodes,
        mcnemar(gained, lost) <= ALPHA,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine())
    print(f"\n| T, k, mu, sigma | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}", flush=True)
    for num, k, mu, sigma in CASES:
        draws = np.random.default_rng(options.seed)
        rows = [findings(draws, *passes(draws, draws.normal(mu, sigma, num), k), k) for _ in range(options.repeats)]
        print(f"| {num}, {k}, {mu:g}, {sigma:g} | {' | '.join(f'{share:.3f}' for share in means(rows))} |", flush=True)
    print("\n| clusters of 5, k | tasks as units | clusters as units |\n|---|---:|---:|", flush=True)
    for num_clusters in (6, 10, 20, 40):
        draws = np.random.default_rng(options.seed)
        units = np.repeat(np.arange(num_clusters), CLUSTER)
        rows = []
        for _ in range(options.repeats):
            shift = draws.normal(0.0, 2**-0.5, num_clusters)[units] + draws.normal(0.0, 2**-0.5, len(units))
            a, b = passes(draws, shift, 8)
            each = [paired_difference(list((b - a) / 8), clusters) for clusters in (None, list(units))]
            rows.append([verdict_of(one) in ("better", "worse") for one in each])
        print(f"| {num_clusters}, 8 | {' | '.join(f'{share:.3f}' for share in means(rows))} |", flush=True)
    print("\n| T | found at the smallest effect |\n|---|---:|", flush=True)
    for num in (6, 10, 20, 50, 200):
        draws = np.random.default_rng(options.seed)
        typical = fmean(
            smallest_effect(paired_difference(list(draws.normal(0.0, 1.0, num)))) or 0.0 for _ in range(500)
        )
        rows = [
            [verdict_of(paired_difference(list(draws.normal(typical, 1.0, num)))) == "better"]
            for _ in range(options.repeats)
        ]
        print(f"| {num} | {means(rows)[0]:.3f} |", flush=True)


def means(rows: Sequence[Sequence[bool]]) -> list[float]:
    """Return the share of true values in each column."""
    return [fmean(column) for column in zip(*rows, strict=True)]


if __name__ == "__main__":
    main()
