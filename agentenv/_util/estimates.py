"""Estimate means over tasks with their intervals, and pass@k.

In: one value at a time. Out: `Estimate`s. Nothing here grows with the number of values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_Z = 1.959963984540054
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)


class Moments:
    """Number, sum, mean and variance of finite floats, one at a time. Source: Welford 1962."""

    __slots__ = ("_mean", "_squares", "num", "total")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.num = 0
        self.total = 0.0
        self._mean = 0.0
        self._squares = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float, times: int = 1) -> None:
        """Count a finite value `times` times."""
        self.num += times
        self.total += value * times
        away = value - self._mean
        self._mean += away * times / self.num
        self._squares += away * times * (value - self._mean)

    @property
    def mean(self) -> float | None:
        """None without a value."""
        return self.total / self.num if self.num else None

    @property
    def variance(self) -> float:
        """Variance of the values as a sample; of at least two of them. Exactly 0.0 if all are equal."""
        return self._squares / (self.num - 1)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k samples passes: 1 - C(n-c, k) / C(n, k), unbiased.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.

    Raises:
        ValueError: not 0 <= num_passed <= num_samples, or not 1 <= k <= num_samples.
    """
    _check_counts(num_samples, num_passed, k)
    drawn = math.comb(num_samples, k)
    return (drawn - math.comb(num_samples - num_passed, k)) / drawn


def pass_all_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that all of k samples pass, also written pass^k: C(c, k) / C(n, k), unbiased.

    Source: Yao et al. 2024, tau-bench, section 4.

    Raises:
        ValueError: as `pass_at_k`.
    """
    _check_counts(num_samples, num_passed, k)
    return math.comb(num_passed, k) / math.comb(num_samples, k)


def _check_counts(num_samples: int, num_passed: int, k: int) -> None:
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k: expected 0 <= num_passed <= num_samples and 1 <= k <= num_samples, got n={num_samples}, "
            f"num_passed={num_passed}, k={k}. Leave out tasks with fewer than k samples."
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval."""

    mean: float | None
    """None without a task."""
    ci95_low: float | None
    """None with fewer than two tasks, which say nothing about other tasks, or if all values are one outside 0..1."""
    ci95_high: float | None
    num_tasks: int
    """Number of tasks in the mean."""


def mean_over_tasks(values: Iterable[float] | Moments) -> Estimate:
    """Return mean and Student t interval of one value per task (for a task with several samples: their mean)."""
    moments = values if isinstance(values, Moments) else Moments(values)
    mean, num = moments.mean, moments.num
    if mean is None or num < 2:
        return Estimate(mean, None, None, num)
    half = student_t(num - 1) * math.sqrt(moments.variance / num)
    return Estimate(mean, mean - half, mean + half, num)


def share_over_tasks(values: Iterable[float] | Moments, num_samples: int) -> Estimate:
    """Return mean and Wilson interval of one value in [0, 1] per task, estimated from `num_samples` episodes in all.

    The interval uses the effective sample size mean (1 - mean) / (variance of the mean over tasks), at most
    `num_samples`, and the number of tasks where every value is 0 or every value is 1: ten tasks that all passed show
    [0.72, 1.0], not [1.0, 1.0]. Source: Wilson 1927; Franco et al. 2019, doi:10.1093/jssam/smy019.
    """
    moments = values if isinstance(values, Moments) else Moments(values)
    mean, num = moments.mean, moments.num
    if mean is None or num < 2:
        return Estimate(mean, None, None, num)
    spread, size = moments.variance / num, float(num)
    if 0.0 < mean < 1.0:
        size = min(mean * (1.0 - mean) / spread, num_samples) if spread > 0.0 else num_samples
    scale = 1.0 + _Z**2 / size
    middle = (mean + _Z**2 / (2.0 * size)) / scale
    half = _Z * math.sqrt(mean * (1.0 - mean) / size + _Z**2 / (4.0 * size**2)) / scale
    return Estimate(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)), num)


def over_tasks(values: Iterable[float] | Moments, num_samples: int, low: float, high: float) -> Estimate:
    """Return the mean of one value per task; the values of all episodes are `low` to `high`.

    Where they are in 0..1, the mean is a share, and its interval stays within 0..1. Elsewhere no bound is known, and
    equal values have no interval: one of zero width would claim too much.
    """
    if low >= 0.0 and high <= 1.0:
        return share_over_tasks(values, num_samples)
    found = mean_over_tasks(values)
    return Estimate(found.mean, None, None, found.num_tasks) if low == high else found


_ROUNDING = 1e-6
"""How far a sum of weighted parts may miss a bound."""


class Passes:
    """How many episodes of each task passed: with a score, or a reward where they have none, of at least `pass_score`.

    Without the reward, an environment that scores only what it finished would lose its truncated episodes. It is
    unknown if no `pass_score` is set and scores, or rewards where no episode has a score, leave 0..1.

    Args:
        pass_score: None: 1.0, and only of scores or rewards that are all in 0..1.
    """

    def __init__(self, pass_score: float | None) -> None:
        self.pass_score = 1.0 if pass_score is None else pass_score
        self._is_set = pass_score is not None
        self._has_score = False
        self._rewards_in_range = self._scores_in_range = True
        self._tasks: Counter[tuple[int, int]] = Counter()  # by their numbers of rewarded and of passed episodes

    def passed(self, reward: float, score: float | None, pass_score: float | None = None) -> bool:
        """Return True if an episode passed; `pass_score` is its own, in 0..1 or not."""
        if pass_score is not None:
            return (reward if score is None else score) >= pass_score - _ROUNDING
        self._has_score |= score is not None
        self._rewards_in_range &= -_ROUNDING <= reward <= 1.0 + _ROUNDING
        self._scores_in_range &= score is None or -_ROUNDING <= score <= 1.0 + _ROUNDING
        return (reward if score is None else score) >= self.pass_score - _ROUNDING

    def add(self, num: int, num_passed: int) -> None:
        """Count a task, by its episodes with a reward."""
        self._tasks[num, num_passed] += 1

    @property
    def are_known(self) -> bool:
        """True if `pass_score` is set, or all scores so far, or rewards without one, are in 0..1."""
        return self._is_set or (self._scores_in_range if self._has_score else self._rewards_in_range)

    def estimates(self, num_samples: int) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
        """Return pass@k and pass^k for k = 1 … `num_samples` over tasks with at least k episodes; None if unknown."""
        tasks = self._tasks if self.are_known else {}
        at_least_one, all_of = {}, {}
        for k in range(1, num_samples + 1):
            one, every, num_episodes = Moments(), Moments(), 0
            for (num, passed), times in tasks.items():
                if num >= k:
                    one.add(pass_at_k(num, passed, k), times)
                    every.add(pass_all_k(num, passed, k), times)
                    num_episodes += num * times
            at_least_one[str(k)] = share_over_tasks(one, num_episodes)
            all_of[str(k)] = share_over_tasks(every, num_episodes)
        return at_least_one, all_of


def student_t(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, for at least one degree of freedom.

    Source: a table for up to five degrees, then Abramowitz and Stegun 26.7.5, which is within 0.002 from there on.
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    z, n = _Z, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
