"""RewardBench's rules: against the table that NeMo RL published, and against vectors worked out by hand."""

import math

import pytest

from agentenv.rewards.evaluation.rewardbench import (
    PRIOR_SETS,
    SECTIONS,
    SUBSETS_2,
    WEIGHTS,
    TiesRow,
    best_of_credit,
    is_ties_row,
    leaderboard_average,
    mean_of,
    sections,
    ties_score,
)
from tests.rewards.evaluation.published import COUNTS


def test_the_weights_are_the_2985_items_but_for_math_prm_which_weighs_as_all_of_hep():
    assert sum(COUNTS.values()) == 2985
    assert {name: n for name, n in WEIGHTS.items() if COUNTS[name] != n} == {"math-prm": 984}
    assert WEIGHTS["math-prm"] == sum(n for name, n in WEIGHTS.items() if name.startswith("hep-"))


def test_every_subset_is_in_one_section():
    assert sorted(subset for of in SECTIONS.values() for subset in of) == sorted(WEIGHTS) == sorted(COUNTS)


def test_an_absent_section_is_not_known_and_is_left_out_of_the_average():
    found = sections({"mt-bench-easy": 0.75})
    assert found == {"Chat": 0.75, "Chat Hard": None, "Safety": None, "Reasoning": None}
    assert leaderboard_average(found, None) == 0.75
    assert leaderboard_average(sections({}), mean_of({}, PRIOR_SETS)) is None


def test_an_absent_subset_is_left_out_of_its_section():
    assert sections({"math-prm": 1.0, "hep-go": 0.0})["Reasoning"] == pytest.approx(984 / (984 + 164))


@pytest.mark.parametrize(
    ("scores", "worth"),
    [([3, 1, 2, 0], 1.0), ([3, 3, 2, 0], 0.5), ([3, 3, 3, 3], 0.25), ([2, 3, 3, 0], 0.0), ([0, 1, 2, 3], 0.0)],
)
def test_best_of_four_is_shared_among_those_that_have_the_highest_score(scores, worth):
    assert best_of_credit(scores) == worth


def test_the_rule_for_the_average_of_rewardbench_2_is_the_plain_mean():
    assert mean_of(dict.fromkeys(SUBSETS_2, 0.5) | {"Ties": 1.0, "Other": 0.0}, SUBSETS_2) == pytest.approx(3.5 / 6)
    assert mean_of({"Math": 0.25}, SUBSETS_2) == 0.25
    assert mean_of({"Other": 1.0}, SUBSETS_2) is None


# --- the Ties subset --------------------------------------------------------------------------------------------------


def test_the_ties_formula_on_a_vector_worked_out_by_hand():
    rows = [
        TiesRow("tied:1", [4.0, 3.0, 1.0], 2),  # right; spread 1, margin 2
        TiesRow("ref:1", [2.5, 2.0], 1),  # right; margin 0.5
        TiesRow("tied:2", [6.0, 2.0, 1.0], 2),  # right; spread 4, margin 1
        TiesRow("ref:2", [0.0, 3.0], 1),  # wrong; margin -3
        TiesRow("tied:3", [1.0, 0.0, 2.0], 2),  # wrong, without a ref
    ]
    much = (math.tanh(0.5 / 1.0 - 1.0) + math.tanh(-3.0 / 4.0 - 1.0)) / 2
    assert ties_score(rows) == pytest.approx(0.3 * 2 / 3 + 0.3 * 1 / 2 + 0.2 * 1 / 2 + 0.2 * 0 / 2 + 0.01 * much)


@pytest.mark.parametrize(("margin", "much"), [(2.0, 1.0), (-2.0, -1.0), (0.0, 0.0)])
def test_if_right_answers_are_equal_the_last_term_is_its_limit_and_zero_by_zero_is_zero(margin, much):
    rows = [TiesRow("tied:1", [1.0, 1.0, 1.0 - margin], 2), TiesRow("ref:1", [margin, 0.0], 1)]
    assert ties_score(rows) - (1.0 if margin > 0 else 0.0) == pytest.approx(0.01 * much)


def test_no_row_has_no_score_and_rows_of_one_kind_have_theirs():
    assert ties_score([]) is None
    assert ties_score([TiesRow("ref:1", [1.0, 0.0], 1)]) == pytest.approx(0.3)


def test_rows_of_the_ties_subset_are_known_by_subset_and_id():
    assert is_ties_row("Ties", "ref:12")
    assert not is_ties_row("Ties", "12")
    assert not is_ties_row("Math", "ref:12")
    assert not is_ties_row("Ties", "ref:12x")
