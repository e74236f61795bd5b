"""Correlations and length bias: against numpy, by hand, and as invariants."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.rewards.evaluation.tables import Pair, correlations, features, length_bias
from agentenv.rewards.hygiene import pearson, spearman

WHOLE = st.integers(-50, 50).map(float)


# --- correlations -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@given(st.lists(st.tuples(WHOLE, WHOLE), min_size=2, max_size=30))
def test_pearson_is_numpys_and_none_where_a_side_is_constant(pairs):
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        assert pearson(xs, ys) is None
    else:
        assert pearson(xs, ys) == pytest.approx(float(numpy.corrcoef(xs, ys)[0, 1]), abs=1e-9)


def test_spearman_goes_by_ranks_and_equal_values_share_theirs():
    assert spearman([1, 2, 3, 4], [1, 8, 27, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # ranks 0, 1.5, 1.5, 3 against 0, 2, 1, 3
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(
        float(numpy.corrcoef([0, 1.5, 1.5, 3], [0, 2, 1, 3])[0, 1])
    )


def test_a_reward_of_length_correlates_with_length_also_within_the_prompt():
    texts = ["a b", "c d e f", "g", "h i j k l m"]
    found = correlations([float(len(text)) for text in texts], texts, [0, 0, 1, 1])
    assert found["length"].pearson == found["length"].spearman == pytest.approx(1.0)
    assert found["length"].within_prompt == pytest.approx(1.0)
    assert found["repetition"].pearson is None


def test_differences_between_prompts_are_not_a_correlation_within_them():
    # Long prompts' answers score more, but of two answers to one the shorter one does.
    texts = ["x" * n for n in (10, 11, 100, 101, 1000, 1001)]
    found = correlations([1.1, 1.0, 2.1, 2.0, 3.1, 3.0], texts, [0, 0, 1, 1, 2, 2])["length"]
    assert found.spearman > 0.7
    assert found.within_prompt == pytest.approx(-1.0)


def test_responses_without_a_reward_are_left_out_of_correlations():
    found = correlations([1.0, None, 3.0], ["a", "b" * 900, "ccc"], [0, 1, 2])
    assert found["length"].pearson == pytest.approx(1.0)
    assert found["length"].within_prompt is None


def test_features_count_characters_marks_and_repeated_words():
    plain = features("One line of prose, 3 * 4 = 12 and a_b.")
    assert plain["format"] == 0.0
    assert plain["repetition"] == 0.0
    marked = features("# Head\n\n- one\n- **two**\n1. three\n```\nx\n```\n| a | b |")
    assert marked["format"] == 8.0
    assert features("one two three four " * 10)["repetition"] > 0.8
    assert features("") == {"length": 0.0, "format": 0.0, "repetition": 0.0}


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_length_bias_separates_a_preference_for_length_from_its_value():
    pairs = [
        Pair(2.0, 1.0, 9, 5),
        Pair(1.0, 2.0, 5, 9),
        Pair(1.0, 2.0, 5, 9),
        Pair(3.0, 1.0, 4, 4),
        Pair(1.0, 1.0, 2, 1),
    ]
    found = length_bias(pairs)
    assert found.prefers_longer == 1.0
    assert found.longer_is_chosen == 0.5
    assert found.accuracy_where_longer_is_chosen == 0.5  # the tie is wrong
    assert found.accuracy_where_shorter_is_chosen == 0.0
    assert length_bias([]).prefers_longer is None
