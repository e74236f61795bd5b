"""Means over tasks with their intervals, pass@k, and sums that are exact in whatever order and however many they are.

In: one value at a time. Out: `Estimate`s. Nothing here grows with the number of values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_Z = 1.959963984540054
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)
_UNIT_BITS = 1074
"""Every finite float is a whole number of 2^-1074."""


class Moments:
    """Number, sum and sum of squares of floats, in whole numbers: nothing is rounded before the mean is asked for.

    `mean` and `variance` equal `statistics.fmean` and `statistics.variance` of the same values, to the last bit.
    """

    __slots__ = ("_squares", "_total", "num")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.num = self._total = self._squares = 0
        for value in values:
            self.add(value)

    def add(self, value: float, times: int = 1) -> None:
        """Count a finite value `times` times."""
        over, under = float(value).as_integer_ratio()
        whole = over << (_UNIT_BITS + 1 - under.bit_length())  # `under` is a power of two
        self.num += times
        self._total += whole * times
        self._squares += whole * whole * times

    @property
    def total(self) -> float:
        """The sum, rounded once, as `math.fsum` gives it."""
        return self._total / (1 << _UNIT_BITS)

    @property
    def mean(self) -> float | None:
        """None without a value."""
        return self.total / self.num if self.num else None

    @property
    def variance(self) -> float:
        """Of the values as a sample; of at least two of them."""
        spread = self.num * self._squares - self._total * self._total
        return spread / (self.num * (self.num - 1) << 2 * _UNIT_BITS)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples passes: 1 - C(n-c, k) / C(n, k), unbiased, in exact integers.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.

    Raises:
        ValueError: not 0 <= num_passed <= num_samples, or not 1 <= k <= num_samples.
    """
    _check_counts(num_samples, num_passed, k)
    drawn = math.comb(num_samples, k)
    return (drawn - math.comb(num_samples - num_passed, k)) / drawn


def pass_all_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that all of k samples pass, also written pass^k: C(c, k) / C(n, k), unbiased.

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
    """None with fewer than two tasks, from which nothing about other tasks follows."""
    ci95_high: float | None
    num_tasks: int
    """Tasks that it is the mean of."""


def mean_over_tasks(values: Iterable[float] | Moments) -> Estimate:
    """Mean and Student t interval of one value per task (for a task with several samples: their mean)."""
    moments = values if isinstance(values, Moments) else Moments(values)
    mean, num = moments.mean, moments.num
    if mean is None or num < 2:
        return Estimate(mean, None, None, num)
    half = _student_t(num - 1) * math.sqrt(moments.variance / num)
    return Estimate(mean, mean - half, mean + half, num)


def share_over_tasks(values: Iterable[float] | Moments, num_samples: int) -> Estimate:
    """Mean and Wilson interval of one value in [0, 1] per task, each estimated from some of `num_samples` episodes.

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


class Passes:
    """How many episodes of each task passed: with a score, or a reward where they have none, of at least `pass_score`.

    Without the reward, an environment that scores only what it finished would lose its truncated episodes. Where no
    episode has a score, rewards leave 0..1, as those of reward models do, and nobody set what passes, nobody knows.

    Args:
        pass_score: None: 1.0, and only of scores, or of rewards that are all in 0..1.
    """

    def __init__(self, pass_score: float | None) -> None:
        self.pass_score = 1.0 if pass_score is None else pass_score
        self._is_set, self._has_score, self._in_range = pass_score is not None, False, True
        self._tasks: Counter[tuple[int, int]] = Counter()  # by their numbers of rewarded and of passed episodes

    def passed(self, reward: float, score: float | None) -> bool:
        """Whether an episode did."""
        self._has_score |= score is not None
        self._in_range &= 0.0 <= reward <= 1.0
        return (reward if score is None else score) >= self.pass_score

    def add(self, num: int, num_passed: int) -> None:
        """Count a task, by its episodes with a reward."""
        self._tasks[num, num_passed] += 1

    def estimates(self, num_samples: int) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
        """pass@k and pass^k by k = 1 … `num_samples`, each over the tasks with at least k episodes; None if unknown."""
        tasks = self._tasks if self._has_score or self._in_range or self._is_set else {}
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


def _student_t(degrees: int) -> float:
    # 97.5 % quantile: a table, then Abramowitz and Stegun 26.7.5, which is within 0.002 from there on.
    if degrees <= len(_T):
        return _T[degrees - 1]
    z, n = _Z, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
