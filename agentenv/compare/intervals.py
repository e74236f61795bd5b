"""The interval over paired tasks that decides a comparison, and what follows from its standard error.

The task is the unit: episodes of one task are not independent. Source: Miller 2024, Adding Error Bars to Evals,
arXiv:2411.00640.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean
from typing import Literal

from agentenv._util.estimates import Moments, student_t

Verdict = Literal["better", "worse", "maybe_worse", "no_worse", "no_difference", "unknown"]

_Z80 = 0.8416212335729143
"""80 % quantile of the normal distribution."""
_MIN_UNANIMOUS = 6
"""Fewest tasks with one difference for which random signs would agree in less than 5 % of the cases: 2 / 2^6."""
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """The mean difference B - A over tasks with its 95 % interval (Student's t)."""

    mean: float
    num_tasks: int
    se: float | None
    """Standard error; None with fewer than two tasks, or clusters. 0.0 if all tasks differ by the same amount."""
    ci95_low: float | None
    """None without a standard error, or if that is 0.0: then no interval can be estimated."""
    ci95_high: float | None
    num_clusters: int | None = None
    """Clusters of tasks, if they are the units."""

    @property
    def num_units(self) -> int:
        """Number of tasks, or of clusters."""
        return self.num_tasks if self.num_clusters is None else self.num_clusters

    @property
    def half(self) -> float | None:
        """Half of the interval's width before it is cut at a bound."""
        return None if self.se is None else student_t(self.num_units - 1) * self.se


def paired_difference(
    differences: Sequence[float], clusters: Sequence[Hashable] | None = None, *, bound: float = math.inf
) -> MeanDifference:
    """Return the mean of one difference per task (at least one) with its interval.

    With the cluster of each task, the interval is that of whole clusters. Source: Liang and Zeger 1986; Miller 2024.
    It is cut at -`bound` and `bound`, between which all differences must be.
    """
    num, mean = len(differences), math.fsum(differences) / len(differences)
    num_clusters = None if clusters is None else len(set(clusters))
    num_units = num if num_clusters is None else num_clusters
    if num_units < 2:
        return MeanDifference(mean, num, None, None, None, num_clusters)
    if clusters is None:
        se = math.sqrt(Moments(differences).variance / num)
    else:
        sums = cluster_sums([each - mean for each in differences], clusters)
        se = math.sqrt(num_units / (num_units - 1) * math.fsum(each**2 for each in sums)) / num
    if se <= _TINY * max(map(abs, differences)):
        return MeanDifference(mean, num, 0.0, None, None, num_clusters)
    half = student_t(num_units - 1) * se
    return MeanDifference(mean, num, se, max(mean - half, -bound), min(mean + half, bound), num_clusters)


def cluster_sums(values: Sequence[float], clusters: Sequence[Hashable]) -> list[float]:
    """Return the sum of the values of each cluster."""
    by_cluster: dict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        by_cluster[cluster].append(value)
    return [math.fsum(each) for each in by_cluster.values()]


def verdict_of(difference: MeanDifference, margin: float = 0.0) -> Verdict:
    """Return what the interval shows: it alone decides.

    "better" or "worse": all of it is beyond the margin. "maybe_worse": all of it is below 0, not all of
    it beyond the margin. "no_worse": all of it is above -margin, which is not 0. "unknown": there are fewer than two
    units. Where all tasks differ by the same amount, no interval can be estimated: that amount counts, if there are
    enough units that chance would not make them agree.
    """
    if difference.se is None:
        return "unknown"
    low, high = difference.ci95_low, difference.ci95_high
    if low is None or high is None:
        if abs(difference.mean) > _TINY and difference.num_units < _MIN_UNANIMOUS:
            return "no_difference"
        low = high = difference.mean
    if low > margin:
        return "better"
    if high < -margin:
        return "worse"
    if margin > 0.0 and low > -margin:
        return "no_worse"
    return "maybe_worse" if high < 0.0 else "no_difference"


def smallest_effect(difference: MeanDifference) -> float | None:
    """Return the true difference that this many tasks would show in 80 of 100 comparisons; None if unknown.

    Source: Card et al. 2020, With Little Power Comes Great Responsibility; with the quantile of the interval, since
    the normal one is too small for few tasks.
    """
    half = difference.half
    return None if half is None or not difference.se else half + _Z80 * difference.se


@dataclass(frozen=True, slots=True)
class Pairing:
    """How much it helped that both runs have the same tasks."""

    se_unpaired: float
    """Standard error of the difference if the tasks of one run were others."""
    correlation: float | None
    """Of the tasks' means in A and in B; None if one run has equal means."""


def pairing_of(means_a: Sequence[float], means_b: Sequence[float]) -> Pairing | None:
    """Return how much pairing helped, from the mean of each task in each run; None with fewer than two tasks."""
    num = len(means_a)
    if num < 2:
        return None
    variance_a, variance_b = Moments(means_a).variance, Moments(means_b).variance
    related = correlation(means_a, means_b) if variance_a > 0.0 and variance_b > 0.0 else None
    return Pairing(math.sqrt((variance_a + variance_b) / num), related)


@dataclass(frozen=True, slots=True)
class Precision:
    """Where the variance of the difference comes from, and what more episodes or more tasks would change."""

    share_within: float
    """Share of the variance that comes from the episodes of a task, 0..1; the rest is between tasks."""
    half: float
    """Half of the interval's width now."""
    half_more_episodes: float
    """The same with four times the episodes per task."""
    half_more_tasks: float
    """The same with four times the tasks."""
    half_at_best: float
    """The same with any number of episodes per task."""

    @property
    def advice(self) -> Literal["episodes", "tasks"]:
        """What to add first: more episodes per task, if most of the variance comes from them, or more tasks."""
        return "episodes" if self.share_within >= 0.5 else "tasks"


def precision_of(difference: MeanDifference, values: Sequence[Sequence[float]]) -> Precision | None:
    """Return the parts of the variance, from the values of each task in each run, which count as independent.

    Of the same episodes, graded again, the values are the differences of each task.

    None without an interval, or where a task has a single episode, which says nothing about its variance.
    Source: Miller 2024, section 3.
    """
    num = difference.num_tasks
    if not difference.se or difference.half is None or min(map(len, values)) < 2:
        return None
    within = math.fsum(Moments(each).variance / len(each) for each in values) / num**2
    total = difference.se**2
    within = min(within, total)
    t = student_t(difference.num_units - 1)
    return Precision(
        share_within=within / total,
        half=difference.half,
        half_more_episodes=t * math.sqrt(total - 0.75 * within),
        half_more_tasks=student_t(4 * difference.num_units - 1) * difference.se / 2.0,
        half_at_best=t * math.sqrt(total - within),
    )


def share_above(values: Iterable[tuple[float, float]]) -> float:
    """Return the share of pairs of a task's episodes in A and in B in which B's value is higher; equal ones count half.

    Source: Agarwal et al. 2021, Deep Reinforcement Learning at the Edge of the Statistical Precipice.
    """
    return fmean((b > a) + 0.5 * (b == a) for a, b in values)
