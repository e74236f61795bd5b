"""Tests of significance against published examples, scipy's values, and enumeration."""

from itertools import combinations, product
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.compare.significance import (
    FALSE_SHARE,
    benjamini_hochberg,
    fisher,
    mcnemar,
    num_needed,
    permutation,
    sign_flips,
    smallest_p,
    task_p,
)

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Differences in height of 15 pairs of maize plants. Source: Fisher 1935, The Design of Experiments, section 21."""
BH_1995 = [
    0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0,
]  # fmt: skip
"""Source: Benjamini and Hochberg 1995, section 4.1."""
GRID = st.sampled_from([0.0, 0.25, 0.5, 1.0, -0.3])


def test_sign_flips_of_darwins_maize_are_those_that_fisher_counted():
    flips = sign_flips(DARWIN)
    assert (flips.p, flips.num, flips.is_exact) == (1726 / 2**15, 2**15, True)


@given(st.lists(GRID, max_size=8))
def test_sign_flips_are_those_of_enumeration(values):
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in product((1, -1), repeat=len(values))
    ]
    expected = fmean(each >= abs(sum(values)) - 1e-9 for each in sums)
    assert sign_flips(values).p == pytest.approx(expected)


def test_more_than_20_tasks_are_drawn_and_close_to_the_exact_value():
    drawn = sign_flips([*DARWIN, *([0.001] * 6)])
    assert (drawn.num, drawn.is_exact) == (10_000, False)
    assert drawn.p == pytest.approx(1726 / 2**15, abs=0.01)
    assert sign_flips([1.0] * 200).p == 1 / 10_001  # the observed pattern counts too


@settings(max_examples=20)
@given(st.lists(st.floats(-3, 3), min_size=21, max_size=25), st.randoms())
def test_drawn_flips_depend_neither_on_the_order_nor_on_which_run_is_first(values, random):
    shuffled = random.sample(values, len(values))
    assert sign_flips(shuffled).p == sign_flips(values).p == sign_flips([-each for each in values]).p


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (150, 86, 3.7159361395713866e-05),  # Agresti's approval ratings; scipy 1.18: binomtest(86, 236)
        (1, 9, 0.021484375),  # 22 / 2^10
        (0, 5, 0.0625),
        (3, 3, 1.0),
        (0, 0, 1.0),
        (50_000, 51_000, 0.0016696304559914016),
    ],
)
def test_mcnemar_is_exact(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p, rel=1e-8)
    assert mcnemar(lost, gained) == mcnemar(gained, lost)


@pytest.mark.parametrize(
    ("table", "p"),
    [
        ((3, 4, 1, 4), 34 / 70),  # the lady tasting tea
        ((4, 4, 0, 4), 2 / 70),
        ((2, 12, 15, 18), 0.0005367241191434358),  # convicted twins, Fisher 1962; R: fisher.test
        ((8, 10, 1, 6), 0.03496503496503495),  # scipy.stats.fisher_exact
        ((0, 5, 0, 7), 1.0),
    ],
)
def test_fishers_test_is_exact(table, p):
    passed_a, num_a, passed_b, num_b = table
    assert fisher(*table) == pytest.approx(p, rel=1e-12)
    assert fisher(passed_b, num_b, passed_a, num_a) == pytest.approx(p, rel=1e-12)
    assert fisher(num_a - passed_a, num_a, num_b - passed_b, num_b) == pytest.approx(p, rel=1e-12)


@given(st.lists(GRID, min_size=1, max_size=5), st.lists(GRID, min_size=1, max_size=5))
def test_a_permutation_test_is_that_of_enumeration(a, b):
    pooled, num = [*a, *b], len(a)
    observed, extreme, total = abs(fmean(a) - fmean(b)), 0, 0
    for chosen in combinations(range(len(pooled)), num):
        rest = [each for i, each in enumerate(pooled) if i not in chosen]
        extreme += abs(fmean([pooled[i] for i in chosen]) - fmean(rest)) >= observed - 1e-9
        total += 1
    assert permutation(a, b) == pytest.approx(extreme / total)
    assert permutation(b, a) == permutation(a, b)


def test_many_arrangements_are_drawn():
    low, high = [float(i) for i in range(12)], [i + 40.0 for i in range(12)]
    assert permutation(low, high) == 1 / 20_001
    assert permutation(low, low) == 1.0


def test_a_task_with_two_values_has_fishers_test():
    assert task_p([0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]) == fisher(0, 4, 4, 4)
    assert task_p([1.0], [1.0]) == 1.0
    assert task_p([0.0, 0.5], [1.0, 1.0]) == permutation([0.0, 0.5], [1.0, 1.0])


@given(st.integers(1, 7), st.integers(1, 7))
def test_the_smallest_p_is_that_of_the_most_different_task(num_a, num_b):
    assert smallest_p(num_a, num_b) == pytest.approx(fisher(0, num_a, num_b, num_b))


def test_the_correction_is_that_of_benjamini_and_hochberg():
    qs = benjamini_hochberg(BH_1995)
    assert sum(q <= 0.05 for q in qs) == 4  # as the paper says
    scipys = [
        0.0015, 0.003, 0.0095, 0.035625, 0.0603, 0.0638571429, 0.0638571429, 0.0645, 0.0765, 0.486, 0.5811818182,
        0.714875, 0.7532307692, 0.8132142857, 1.0,
    ]  # fmt: skip
    assert qs == pytest.approx(scipys)
    assert benjamini_hochberg(BH_1995[::-1]) == qs[::-1]
    assert benjamini_hochberg([]) == []


@pytest.mark.parametrize(("num_tasks", "num"), [(1, 3), (10, 5), (50, 7), (1000, 9)])
def test_so_many_episodes_are_needed_to_name_one_task(num_tasks, num):
    assert num_needed(num_tasks) == num
    ps = [fisher(0, num, num, num), *[1.0] * (num_tasks - 1)]
    assert benjamini_hochberg(ps)[0] <= FALSE_SHARE
    ps[0] = fisher(0, num - 1, num - 1, num - 1)
    assert benjamini_hochberg(ps)[0] > FALSE_SHARE
