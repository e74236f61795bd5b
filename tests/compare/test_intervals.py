"""The interval that decides: published values, clusters, verdicts, and what more data would change."""

import math
from itertools import product
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv._util.estimates import mean_over_tasks, student_t
from agentenv.compare.intervals import (
    MeanDifference,
    paired_difference,
    pairing_of,
    precision_of,
    share_above,
    smallest_effect,
    verdict_of,
)

SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
"""Hours of sleep that one drug added to another's. Source: Student 1908, The probable error of a mean."""


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (5, 2.571), (9, 2.262), (19, 2.093), (49, 2.010), (199, 1.972), (10**6, 1.960)],
)
def test_the_quantiles_are_those_of_published_tables(degrees, quantile):
    assert student_t(degrees) == pytest.approx(quantile, abs=6e-4)


def test_the_interval_is_that_of_students_own_data():
    found = paired_difference(SLEEP)
    assert (found.mean, found.num_tasks) == (pytest.approx(1.58), 10)
    assert found.se == pytest.approx(0.38895872)
    assert (found.ci95_low, found.ci95_high) == pytest.approx((0.7001142, 2.4598858), abs=2e-4)  # R: t.test
    estimate = mean_over_tasks(SLEEP)
    assert (found.ci95_low, found.ci95_high) == pytest.approx((estimate.ci95_low, estimate.ci95_high))


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=12), st.data())
def test_clusters_of_one_task_change_nothing_and_others_are_summed(values, data):
    alone, plain = paired_difference(values, list(range(len(values)))), paired_difference(values)
    assert alone.se == pytest.approx(plain.se)
    clusters = data.draw(st.lists(st.sampled_from("abc"), min_size=len(values), max_size=len(values)))
    found, num = paired_difference(values, clusters), len(set(clusters))
    assert found.num_units == found.num_clusters == num
    if num < 2:
        assert (found.se, found.ci95_low) == (None, None)
        return
    mean, by = fmean(values), {name: [] for name in clusters}
    for value, name in zip(values, clusters, strict=True):
        by[name].append(value - mean)
    se = math.sqrt(num / (num - 1) * sum(sum(row) ** 2 for row in by.values())) / len(values)
    assert found.se == pytest.approx(se, abs=1e-8)
    if found.ci95_low is not None:
        assert found.ci95_high - found.mean == pytest.approx(student_t(num - 1) * se, rel=1e-6)


def interval(low, high, num=10):
    return MeanDifference((low + high) / 2, num, 0.1, low, high)


@pytest.mark.parametrize(
    ("found", "margin", "verdict"),
    [
        (interval(0.01, 0.2), 0.0, "better"),
        (interval(-0.2, -0.01), 0.0, "worse"),
        (interval(-0.01, 0.2), 0.0, "no_difference"),
        (interval(0.0, 0.2), 0.0, "no_difference"),
        (interval(0.01, 0.2), 0.05, "no_worse"),
        (interval(0.06, 0.2), 0.05, "better"),
        (interval(-0.04, 0.2), 0.05, "no_worse"),
        (interval(-0.05, 0.2), 0.05, "no_difference"),
        (interval(-0.2, -0.04), 0.05, "maybe_worse"),
        (interval(-0.2, 0.0), 0.05, "no_difference"),
        (interval(-0.2, -0.06), 0.05, "worse"),
        (interval(-0.04, -0.01), 0.05, "no_worse"),
        (MeanDifference(0.5, 1, None, None, None), 0.0, "unknown"),
        (MeanDifference(0.0, 9, 0.0, None, None), 0.0, "no_difference"),
        (MeanDifference(0.0, 9, 0.0, None, None), 0.01, "no_worse"),
        (MeanDifference(0.5, 6, 0.0, None, None), 0.0, "better"),
        (MeanDifference(0.5, 5, 0.0, None, None), 0.0, "no_difference"),
        (MeanDifference(-0.5, 9, 0.0, None, None, 6), 0.0, "worse"),
        (MeanDifference(-0.5, 9, 0.0, None, None, 5), 0.0, "no_difference"),
    ],
)
def test_one_interval_decides(found, margin, verdict):
    assert verdict_of(found, margin) == verdict


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [2 / 3 - 1 / 3, 1 - 2 / 3, 1 / 3]])
def test_equal_differences_have_no_interval_even_if_rounding_tells_them_apart(values):
    found = paired_difference(values)
    assert (found.se, found.ci95_low, found.ci95_high) == (0.0, None, None)
    assert smallest_effect(found) is None


def test_the_smallest_effect_is_beyond_the_interval():
    found = paired_difference(SLEEP)
    assert smallest_effect(found) == pytest.approx((2.2619 + 0.8416) * found.se, rel=1e-3)
    assert smallest_effect(paired_difference([1.0])) is None


def test_pairing_helps_where_tasks_are_of_different_difficulty():
    means_a = [0.1, 0.4, 0.6, 0.9]
    found = pairing_of(means_a, [each + 0.05 for each in means_a])
    assert found.correlation == pytest.approx(1.0)
    assert found.se_unpaired == pytest.approx(math.sqrt(2 * variance(means_a) / 4))
    assert pairing_of([0.5, 0.5], [0.1, 0.2]).correlation is None
    assert pairing_of([0.5], [0.1]) is None


def test_variance_within_tasks_asks_for_episodes_and_variance_between_them_for_tasks():
    same = [[0.0, 1.0]] * 4
    noisy = precision_of(paired_difference([0.2, -0.2, 0.3, 0.1]), same * 2)
    assert (noisy.share_within, noisy.advice) == (1.0, "episodes")  # 4 * (1/4 + 1/4) / 16 is more than there is
    assert noisy.half_more_episodes == pytest.approx(noisy.half / 2)
    assert noisy.half_at_best == pytest.approx(0.0)
    exact = [[0.5, 0.5]] * 4
    certain = precision_of(paired_difference([0.2, -0.2, 0.3, 0.1]), exact * 2)
    assert (certain.share_within, certain.advice) == (0.0, "tasks")
    assert certain.half_more_episodes == certain.half_at_best == pytest.approx(certain.half)
    assert certain.half_more_tasks < certain.half / 2
    mixed = precision_of(paired_difference([2.0, -2.0, 3.0, 1.0]), same * 2)
    assert mixed.share_within == pytest.approx(0.125 / paired_difference([2.0, -2.0, 3.0, 1.0]).se ** 2)


def test_a_task_with_one_episode_says_nothing_about_the_variance_within_tasks():
    found = paired_difference([0.2, -0.2])
    assert precision_of(found, [[0.0, 1.0], [1.0], [0.0, 1.0], [1.0, 0.0]]) is None
    assert precision_of(paired_difference([0.2]), [[0.0, 1.0]] * 2) is None


def test_the_probability_that_b_is_higher_counts_ties_half():
    assert share_above(product([0.0, 1.0], [1.0, 1.0])) == 0.75
    assert share_above([(0.0, 2.0)]) == 1.0
    assert share_above([(0.3, 0.3)]) == 0.5
