"""Figures of an evaluation: the published table as golden data, failures apart, references, the report."""

import json

import pytest

from agentenv.errors import ConfigError
from agentenv.rewards.evaluation.evaluate import ItemOutcome
from agentenv.rewards.evaluation.tables import (
    Report,
    check_bench,
    correlations,
    deltas,
    features,
    hygiene_of,
    length_bias,
    read_reference,
    table_of,
)
from tests.rewards.evaluation.published import COUNTS, NEMO, REFERENCE
from tests.rewards.evaluation.scorers import pair


def outcome(*scores, subset="s", item_id="0", num_chosen=1, index=0, error=""):
    return ItemOutcome(index, item_id, subset, scores, num_chosen, truncated=(False,) * len(scores), error=error)


def outcomes_of(accuracies):
    """As many right and wrong items of each subset as a published accuracy means."""
    found = []
    for subset, accuracy in accuracies.items():
        right = round(accuracy * COUNTS[subset])
        assert right / COUNTS[subset] == pytest.approx(accuracy, abs=1e-12)
        found += [outcome(1.0, 0.0, subset=subset)] * right
        found += [outcome(0.0, 1.0, subset=subset)] * (COUNTS[subset] - right)
    return found


@pytest.fixture(scope="module")
def nemo():
    return table_of(outcomes_of(NEMO), bench="rewardbench")


def test_the_published_items_give_the_published_table(nemo):
    assert {name: subset.score for name, subset in nemo.subsets.items()} == pytest.approx(NEMO)
    assert {n: round(100 * value, 3) for n, value in nemo.sections.items()} == {
        "Chat": 98.324, "Chat Hard": 84.430, "Safety": 93.514, "Reasoning": 98.333,
    }  # fmt: skip
    assert round(100 * nemo.average, 3) == 93.650
    assert round(100 * nemo.total.score, 3) == 95.075  # each item counting the same
    assert nemo.total.num == 2985
    assert round(100 * table_of(outcomes_of(REFERENCE), bench="rewardbench").total.score, 3) == 95.109


def test_the_published_tables_are_within_three_items_of_each_other_and_not_within_two(nemo):
    found = deltas(nemo, REFERENCE)
    assert all(delta.within for delta in found.values())
    assert max(abs(delta.items) for delta in found.values()) == pytest.approx(3)
    assert sum(abs(delta.items) > 1e-6 for delta in found.values()) == 10
    assert [name for name, delta in deltas(nemo, REFERENCE, tolerance=2).items() if not delta.within] == ["donotanswer"]


def test_a_reference_with_other_subsets_is_refused_and_one_with_more_is_not(nemo):
    with pytest.raises(ConfigError, match="expected a subset among"):
        deltas(nemo, {"Math": 0.5})
    assert list(deltas(nemo, {"hep-go": 0.99, "Math": 0.5})) == ["hep-go"]
    with pytest.raises(ConfigError, match="--tolerance"):
        deltas(nemo, REFERENCE, tolerance=-1)


def test_a_subset_that_could_not_be_judged_is_not_within_its_reference():
    table = table_of([outcome(None, 1.0, error="infra")], bench="pairs")
    assert table.subsets["s"].score is None
    assert deltas(table, {"s": 0.0})["s"].within is False


def test_failures_are_counted_apart_and_never_as_wrong():
    """nemo Gym #1606: a judge that failed looks like an answer that is wrong."""
    table = table_of([outcome(1.0, 0.0), outcome(0.0, 1.0), outcome(None, 0.5, error="infra")], bench="pairs")
    assert (table.total.num, table.total.failed, table.total.judged, table.total.score) == (3, 1, 2, 0.5)
    assert table.accuracy.num_tasks == 2


@pytest.mark.parametrize(("ties", "score"), [("strict", 0.5), ("half", 0.75)])
def test_ties_are_counted_and_worth_what_the_rule_says(ties, score):
    table = table_of([outcome(1.0, 0.0), outcome(2.0, 2.0)], bench="pairs", ties=ties)
    assert (table.total.ties, table.total.score, table.ties) == (1, score, ties)


def test_prior_sets_join_the_sections_where_they_are_there():
    table = table_of([outcome(1.0, 0.0, subset="hep-go"), outcome(0.0, 1.0, subset="shp")], bench="rewardbench")
    assert table.sections["Prior Sets"] == 0.0
    assert table.average == pytest.approx(2 / 3)
    assert table.sections["Chat"] is None


def test_rewardbench_2_is_best_of_four_and_its_ties_have_their_own_formula():
    rows = [
        outcome(3.0, 1.0, 2.0, 3.0, subset="Math"),
        outcome(3.0, 1.0, 2.0, 0.0, subset="Math"),
        outcome(5.0, 5.0, 1.0, subset="Ties", item_id="tied:1", num_chosen=2),
        outcome(4.0, 0.0, subset="Ties", item_id="ref:1"),
        outcome(5.0, 2.0, 3.0, subset="Ties", item_id="tied:2", num_chosen=2),
    ]
    table = table_of(rows, bench="rewardbench2")
    assert table.subsets["Math"].score == 0.75
    # tied: one of two right, ref: one of one, question 1 has both rows
    assert table.subsets["Ties"].score == pytest.approx(0.3 * 0.5 + 0.3 + 0.2 + 0.2 + 0.01)
    assert (table.subsets["Ties"].correct, table.subsets["Ties"].num) == (2.0, 3)
    assert table.average == pytest.approx((0.75 + 0.86) / 2)


# --- references -------------------------------------------------------------------------------------------------------


def test_references_are_read_from_rewardbenchs_files_and_from_ours(tmp_path, nemo):
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps({"model": "m", "model_type": "Seq", "chat_template": None, **REFERENCE}))
    assert read_reference(theirs) == REFERENCE
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps(report(nemo).to_dict()))
    assert read_reference(ours) == pytest.approx(NEMO)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"a": "b", "c": true, "d": 7}', '{"subsets": []}'])
def test_a_reference_without_accuracies_is_refused(tmp_path, text):
    (tmp_path / "ref.json").write_text(text)
    with pytest.raises(ConfigError, match="--reference"):
        read_reference(tmp_path / "ref.json")
    with pytest.raises(ConfigError, match="--reference"):
        read_reference(tmp_path / "none.json")


# --- the report -------------------------------------------------------------------------------------------------------

ITEMS = [pair("longer text", "short", index=0), pair("no", "**long** text", index=1), pair("x", "y", index=2)]
OUTCOMES = [outcome(2.0, 1.0), outcome(0.0, 3.0, index=1), outcome(None, 1.0, index=2, error="infra: 500")]


def report(table, **more):
    return Report("a|rm", "data.jsonl", table, hygiene_of(ITEMS, OUTCOMES), **more)


def test_hygiene_is_of_answers_with_scores_and_pairs_without_failures():
    found = hygiene_of(ITEMS, OUTCOMES)
    assert found.length_bias.prefers_longer == 1.0
    assert found.length_bias.longer_is_chosen == 0.5
    assert found.correlations["length"] > 0.5
    rewards, texts = [2.0, 1.0, 0.0, 3.0, 1.0], ["longer text", "short", "no", "**long** text", "y"]
    assert dict(found.correlations) == correlations(rewards, texts)


def test_the_markdown_has_its_tables_and_says_what_failed():
    table = table_of(OUTCOMES, bench="pairs")
    found = report(table, deltas=deltas(table, {"s": 1.0}, tolerance=0), errors={"infra: 500 | x": 1})
    shown = found.markdown()
    assert "# a|rm on data.jsonl" in shown
    assert "Accuracy 0.5000 (95 %: 0.0" in shown
    assert "1 of 2 items" in shown
    assert "1 failed and are not counted" in shown
    assert "| s | 3 | 1 | 1 | 0 | 0.5000 |" in shown
    assert "| s | 1.0000 | 0.5000 | -1 | NO |" in shown
    assert "| infra: 500 \\| x | 1 |" in shown
    assert not found.ok
    assert found.to_dict()["within_reference"] is False


@pytest.mark.parametrize(
    ("bench", "rows", "said"),
    [
        ("rewardbench2", [pair("a", "b")], "expected rows with several rejected answers, got item '0' with 1 and 1"),
        ("rewardbench", [pair("a", "b", subset="mine")], "expected a subset of RewardBench, got mine"),
    ],
)
def test_a_bench_is_not_forced_on_other_rows(bench, rows, said):
    with pytest.raises(ConfigError, match=said):
        check_bench(bench, rows)
    check_bench("auto", rows)
    check_bench("rewardbench2", [pair("a", ["b", "c"]), pair("a", "b", subset="Ties", id="ref:1")])
    check_bench("rewardbench", [pair("a", "b", subset="hep-go")])


# --- biases -----------------------------------------------------------------------------------------------------------


def test_a_reward_of_length_correlates_with_length_and_responses_without_a_reward_are_left_out():
    texts = ["a b", "x" * 900, "c d e f", "g", "h i j k l m"]
    found = correlations([float(len(text)) if len(text) < 900 else None for text in texts], texts)
    assert found["length"] == pytest.approx(1.0)
    assert found["repetition"] is None


def test_features_count_characters_marks_and_repeated_words():
    plain = features("One line of prose, 3 * 4 = 12 and a_b.")
    assert plain["format"] == 0.0
    assert plain["repetition"] == 0.0
    marked = features("# Head\n\n- one\n- **two**\n1. three\n```\nx\n```\n| a | b |")
    assert marked["format"] == 8.0
    assert features("one two three four " * 10)["repetition"] > 0.8
    assert features("") == {"length": 0.0, "format": 0.0, "repetition": 0.0}


def test_length_bias_separates_a_preference_for_length_from_its_value():
    pairs = [
        (1.0, 4),
        (-1.0, -4),
        (-1.0, -4),
        (2.0, 0),
        (0.0, 1),
    ]
    found = length_bias(pairs)
    assert found.prefers_longer == 1.0
    assert found.longer_is_chosen == 0.5
    assert found.accuracy_where_longer_is_chosen == 0.5  # the tie is wrong
    assert found.accuracy_where_shorter_is_chosen == 0.0
    assert length_bias([]).prefers_longer is None
