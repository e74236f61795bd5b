"""Correlations, length bias, calibration and disagreement: against numpy, by hand, and as invariants."""

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ConfigError
from agentenv.rewards.evaluation.hygiene import (
    Pair,
    calibration,
    correlations,
    disagreements,
    features,
    length_bias,
    metrics,
    pearson,
    spearman,
)

NUMBERS = st.floats(-1e6, 1e6)
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


@pytest.mark.long
@given(st.lists(st.tuples(WHOLE, WHOLE), min_size=2, max_size=20))
def test_spearman_does_not_change_with_a_scale_that_keeps_the_order(pairs):
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    assert spearman(xs, ys) == spearman([x**3 + 2 * x for x in xs], ys) == spearman(ys, xs)


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0]])
def test_a_correlation_of_too_little_is_not_known(values):
    assert pearson(values, values) is None
    assert spearman(values, values) is None


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ConfigError, match="equally many"):
        pearson([1.0], [1.0, 2.0])
    with pytest.raises(ConfigError, match="equally many"):
        correlations([1.0], ["a"], [])
    with pytest.raises(ConfigError, match="same items"):
        disagreements({"a": [1.0], "b": []})


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


def test_prompts_with_one_response_have_no_part_in_what_is_within_prompts():
    rewards, texts, prompts = (
        [1.0, 2.0, 5.0, 3.0, 1.0, 4.0],
        ["a", "bb", "c", "dddd", "eeeeee", "f"],
        [0, 0, 1, 1, 2, 2],
    )
    found = correlations(rewards, texts, prompts)["length"].within_prompt
    alone = correlations([*rewards, 9.0, 0.0], [*texts, "g", "hh"], [*prompts, 3, 4])["length"].within_prompt
    assert alone == found
    assert -1.0 < found < 1.0


def test_responses_without_a_reward_are_left_out_of_correlations():
    found = correlations([1.0, None, 3.0], ["a", "b" * 900, "ccc"], [0, 1, 2])
    assert found["length"].pearson == pytest.approx(1.0)
    assert found["length"].within_prompt is None


def test_metrics_of_a_batch_are_numbers_under_flat_names():
    texts = ["a", "bb", "c c c c c c c c c", "**d**"]
    found = metrics([1.0, 2.0, 3.0, None], texts, [0, 0, 1, 1])
    assert found["rewards/hygiene/length/spearman"] == pytest.approx(1.0)
    assert {name for name in found if "format" in name} == set()  # no text with a reward has a mark
    assert all(-1.0 <= value <= 1.0 for value in found.values())


def test_features_count_characters_marks_and_repeated_words():
    plain = features("One line of prose, 3 * 4 = 12 and a_b.")
    assert plain["format"] == 0.0
    assert plain["repetition"] == 0.0
    marked = features("# Head\n\n- one\n- **two**\n1. three\n```\nx\n```\n| a | b |")
    assert marked["format"] == 8.0
    assert features("one two three four " * 10)["repetition"] > 0.8
    assert features("") == {"length": 0.0, "format": 0.0, "repetition": 0.0}


def test_features_of_hostile_text_take_no_time():
    import time

    begun = time.process_time()
    for text in ("**" * 500_000, " " * 1_000_000, "\n" * 1_000_000, "*" * 1_000_000, "- " * 500_000):
        features(text)
    assert time.process_time() - begun < 30.0


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


def test_calibration_compares_accuracy_with_the_sigmoid_of_the_margin():
    found = calibration([math.log(3.0)] * 3 + [-math.log(3.0)], num_bins=1)
    assert found.bins[0].accuracy == 0.75
    assert found.bins[0].predicted == pytest.approx(0.75)
    assert found.error == pytest.approx(0.0)
    sure = calibration([20.0, 20.0, -20.0, -20.0], num_bins=2)
    assert sure.error == pytest.approx(0.5)
    assert calibration([]).error is None


@pytest.mark.long
@given(st.lists(NUMBERS, max_size=40), st.integers(1, 8))
def test_calibration_bins_hold_every_pair_once_in_order(margins, num_bins):
    found = calibration(margins, num_bins=num_bins)
    assert sum(each.num for each in found.bins) == len(margins)
    assert len(found.bins) == min(num_bins, len(margins))
    edges = [edge for each in found.bins for edge in (each.low, each.high)]
    assert edges == sorted(edges)
    right = sum(0.5 * ((m > 0) - (m < 0)) + 0.5 for m in margins)
    assert sum(each.num * each.accuracy for each in found.bins) == pytest.approx(right)


def test_the_brier_score_is_a_quarter_for_a_coin_and_nothing_for_the_sure_and_right():
    assert calibration([0.0, 0.0]).brier == 0.25
    assert calibration([90.0, 90.0]).brier == pytest.approx(0.0)
    assert calibration([-90.0]).brier == pytest.approx(1.0)
    assert calibration([math.log(3.0), -math.log(3.0)]).brier == pytest.approx((0.25**2 + 0.75**2) / 2)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 1.0, 7.0, 1e6])
def test_a_temperature_undoes_a_scale(factor):
    # Three of four right at this margin: the sigmoid of log(3) says just that.
    found = calibration([factor * math.log(3.0)] * 3 + [-factor * math.log(3.0)], num_bins=1)
    assert found.temperature == pytest.approx(factor, rel=1e-6)
    assert found.error_at_temperature == pytest.approx(0.0, abs=1e-6)
    assert found.brier_at_temperature == pytest.approx(0.75 * 0.25)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=30))
def test_no_other_temperature_is_likelier(margins):
    def loss(temperature):
        return sum(math.log1p(math.exp(-margin / temperature)) for margin in margins)

    found = calibration(margins).temperature
    if found is not None and found > 0.1:
        assert loss(found) <= min(loss(found * 1.01), loss(found / 1.01)) + 1e-6


@pytest.mark.parametrize("margins", [[], [0.0], [1.0, 2.0], [-1.0, 1.0], [-2.0, 1.0], [1e-320, -1e-320]])
def test_without_a_likeliest_value_the_temperature_is_missing(margins):
    found = calibration(margins)
    assert (found.temperature, found.error_at_temperature, found.brier_at_temperature) == (None, None, None)


def test_a_tie_is_half_right_in_a_bin():
    assert calibration([0.0], num_bins=3).bins[0].accuracy == 0.5


# --- several reward models --------------------------------------------------------------------------------------------


def test_disagreement_counts_opposite_preferences_and_ties_as_half():
    (found,) = disagreements({"a": [1.0, -1.0, 2.0, None, 3.0], "b": [1.0, 1.0, 0.0, 5.0, None]})
    assert (found.first, found.second, found.num) == ("a", "b", 3)
    assert found.opposite == pytest.approx((0 + 1 + 0.5) / 3)
    three = disagreements({"a": [1.0], "b": [1.0], "c": [None]})
    assert [(each.first, each.second, each.opposite) for each in three] == [
        ("a", "b", 0.0), ("a", "c", None), ("b", "c", None),
    ]  # fmt: skip
