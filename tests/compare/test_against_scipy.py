"""Intervals and tests of significance have the values of scipy's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.compare.intervals import paired_difference, student_t
from agentenv.compare.significance import benjamini_hochberg, fisher, mcnemar, permutation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stats():
    return pytest.importorskip("scipy.stats", reason="the statistics are compared with `pip install scipy`")


@given(gained=st.integers(0, 400), lost=st.integers(0, 400))
def test_mcnemar_is_the_binomial_test(stats, gained, lost):
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_fishers_test_is_scipys(stats, num_a, num_b, data):
    a, b = data.draw(st.integers(0, num_a)), data.draw(st.integers(0, num_b))
    expected = stats.fisher_exact([[a, num_a - a], [b, num_b - b]]).pvalue
    assert fisher(a, num_a, b, num_b) == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_the_correction_is_scipys(stats, ps):
    assert benjamini_hochberg(ps) == pytest.approx(list(stats.false_discovery_control(ps)))


@pytest.mark.parametrize("degrees", [*range(1, 40), 100, 1000])
def test_quantiles_are_scipys(stats, degrees):
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3)  # an expansion


@given(st.lists(st.integers(-20, 20), min_size=3, max_size=60).filter(lambda values: len(set(values)) > 2))
def test_the_interval_is_scipys(stats, values):
    found = paired_difference([value / 8 for value in values])
    low, high = stats.ttest_1samp([value / 8 for value in values], 0.0).confidence_interval()
    assert (found.ci95_low, found.ci95_high) == pytest.approx((low, high), rel=0, abs=6e-4 * (high - low))


LISTS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=6)


@given(LISTS, LISTS)
def test_a_permutation_test_is_scipys(stats, a, b):
    def difference(x, y, axis):
        return x.mean(axis=axis) - y.mean(axis=axis)

    found = stats.permutation_test((a, b), difference, vectorized=True, n_resamples=math.inf)
    smaller, larger = (float((abs(found.null_distribution) >= abs(found.statistic) + e).mean()) for e in (1e-9, -1e-9))
    assert smaller - 1e-9 <= permutation(a, b) <= larger + 1e-9
