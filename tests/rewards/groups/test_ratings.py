"""Bradley-Terry strengths against hand-computed values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.rewards.groups.tournament import bradley_terry


def test_the_prior_keeps_a_winner_of_everything_finite():
    """Two games won of two, and one tied with the average: x solves 2.5/x = 2/(x + 1/x) + 1/(x + 1), by hand 2.7511."""
    strength = bradley_terry([[0, 2], [0, 0]])[0]
    assert math.exp(strength) == pytest.approx(2.7511, rel=1e-5)


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_strengths_are_where_expected_points_are_those_taken(points):
    strengths, count = bradley_terry(points), len(points)

    def chance(gap):
        return 1 / (1 + math.exp(-gap))

    for i in range(count):
        others = [j for j in range(count) if j != i]
        taken = sum(points[i][j] for j in others) + 1 / 2
        games = sum((points[i][j] + points[j][i]) * chance(strengths[i] - strengths[j]) for j in others)
        assert games + chance(strengths[i]) == pytest.approx(taken, abs=1e-5)
    assert sum(map(chance, strengths)) == pytest.approx(count / 2, abs=1e-6)
