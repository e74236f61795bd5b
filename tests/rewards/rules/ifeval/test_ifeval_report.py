"""The benchmark's figures, against counts made by hand."""

import json
import sys
from pathlib import Path

import pytest

from agentenv.errors import DataError, MissingDependency
from agentenv.rewards.rules.ifeval import language
from agentenv.rewards.rules.ifeval.figures import Accuracy, report

OWN = [json.loads(line) for line in (Path(__file__).parent / "rows.jsonl").read_text().splitlines()]
IFEVAL = Path(__file__).resolve().parents[5] / "shared" / "data" / "ifeval_input_data.jsonl"
shared = pytest.mark.skipif(not IFEVAL.exists(), reason="ifeval_input_data.jsonl is not here")

SHORT = "สวัสดี"
"""One sentence of two words in Thai: no letter, capital, comma or keyword of any row, and no markup."""
RICH = 'ได้ครับ\n"<<ก>> [ข] *ค*"'
"""The same of six words, with a title, a placeholder, a highlight, and quotation marks around its last line."""


def test_our_own_rows_are_judged_as_by_hand():
    found = report(OWN, [row["response"] for row in OWN])
    for row, judgement in zip(OWN, found.judgements, strict=True):
        assert [list(judgement.strict), list(judgement.loose)] == [row["strict"], row["loose"]], row
    assert found.prompts == Accuracy(33, 16, 23)
    assert found.instructions == Accuracy(44, 23, 32)
    assert found.groups["startend"] == Accuracy(3, 1, 3)
    assert found.types["length_constraints:number_words"] == Accuracy(2, 1, 2)
    assert len(found.types) == 25
    assert sum(accuracy.total for accuracy in found.groups.values()) == 44


@shared
def test_a_short_answer_to_all_of_ifeval_scores_as_counted_by_hand():
    found = _scripted(SHORT)
    assert found.prompts == Accuracy(541, 62, 62)
    assert found.instructions == Accuracy(834, 192, 192)
    assert {name: (each.total, each.strict) for name, each in found.types.items() if each.strict} == {
        "change_case:capital_word_frequency": (25, 7),
        "keywords:forbidden_words": (49, 49),
        "keywords:frequency": (42, 11),
        "keywords:letter_frequency": (33, 11),
        "language:response_language": (31, 1),
        "length_constraints:number_sentences": (52, 29),  # all 28 "less than", and one "at least 1"
        "length_constraints:number_words": (52, 18),
        "punctuation:no_comma": (66, 66),
    }
    assert len(found.types) == 25


@shared
def test_a_rich_answer_to_all_of_ifeval_scores_more_when_read_loosely():
    found = _scripted(RICH)
    assert found.prompts == Accuracy(541, 87, 121)
    assert found.instructions == Accuracy(834, 245, 303)
    assert found.types["startend:quotation"] == Accuracy(41, 0, 41)
    assert found.types["detectable_format:json_format"] == Accuracy(17, 0, 17)  # the last line is a JSON text
    assert found.types["detectable_format:title"] == Accuracy(37, 37, 37)
    assert found.types["detectable_content:number_placeholders"] == Accuracy(27, 7, 7)
    assert found.types["detectable_format:number_highlighted_sections"] == Accuracy(48, 9, 9)


def _scripted(text):
    rows = [json.loads(line) for line in IFEVAL.read_text().splitlines()]
    return report(rows, [text] * len(rows))


ROWS = [
    {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]},
    {"label": json.dumps({"func_name": "validate_no_commas"})},
    {"ground_truth": {"func_name": "verify_bullet_points", "N": 1}},
]
ANSWERS = ['"a"', "<think>a, b</think>c", "Sure, it is:\n* a\n* b\n"]


def test_rows_of_both_forms_stand_in_one_table():
    found = report(ROWS, ANSWERS)
    assert found.as_dict() == {
        "prompt_level_strict_acc": 2 / 3,
        "prompt_level_loose_acc": 1.0,
        "inst_level_strict_acc": 0.75,
        "inst_level_loose_acc": 1.0,
        "num_prompts": 3,
        "num_instructions": 4,
        "groups": {
            "detectable_format": {"total": 1, "strict": 0, "loose": 1, "strict_share": 0.0, "loose_share": 1.0},
            "punctuation": {"total": 2, "strict": 2, "loose": 2, "strict_share": 1.0, "loose_share": 1.0},
            "startend": {"total": 1, "strict": 1, "loose": 1, "strict_share": 1.0, "loose_share": 1.0},
        },
        "types": {
            "detectable_format:number_bullet_lists": {
                "total": 1, "strict": 0, "loose": 1, "strict_share": 0.0, "loose_share": 1.0,
            },
            "punctuation:no_comma": {"total": 2, "strict": 2, "loose": 2, "strict_share": 1.0, "loose_share": 1.0},
            "startend:quotation": {"total": 1, "strict": 1, "loose": 1, "strict_share": 1.0, "loose_share": 1.0},
        },
    }  # fmt: skip
    json.dumps(found.as_dict())
    assert found.table().splitlines() == [
        "                                         number  strict   loose",
        "prompts                                       3   66.7%  100.0%",
        "instructions                                  4   75.0%  100.0%",
        "detectable_format                             1    0.0%  100.0%",
        "  detectable_format:number_bullet_lists       1    0.0%  100.0%",
        "punctuation                                   2  100.0%  100.0%",
        "  punctuation:no_comma                        2  100.0%  100.0%",
        "startend                                      1  100.0%  100.0%",
        "  startend:quotation                          1  100.0%  100.0%",
    ]


def test_zero_rows_are_not_an_error():
    found = report([], [])
    assert (found.prompts.strict_share, found.instructions.loose_share) == (0.0, 0.0)
    assert len(found.table().splitlines()) == 3


def test_a_response_that_does_not_end_its_thinking_follows_nothing():
    assert report([ROWS[1]], ["<think>no comma"]).prompts == Accuracy(1, 0, 0)


@pytest.mark.parametrize(("rows", "responses", "message"), [
    (ROWS, ["a"], "responses: expected one for each of 3 rows, got 1"),
    (ROWS[:1], [None], r"responses\[0\]: expected a text, got None"),
    (["row"], ["a"], r"rows\[0\]: expected a row"),
    ([ROWS[0], {"prompt": "a"}], ["a", "b"], r"rows\[1\]: label: expected IFEval's"),
    ([{"func_name": "verify_bullet_points", "N": "x"}], ["a"], r"rows\[0\]: verify_bullet_points\.N: expected a whole"),
])  # fmt: skip
def test_anything_that_cannot_be_reported_is_named(rows, responses, message):
    with pytest.raises(DataError, match=message):
        report(rows, responses)


def test_a_missing_langdetect_stops_the_report_and_is_not_a_verdict(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    monkeypatch.setattr(language, "_loaded", [])
    row = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
    with pytest.raises(MissingDependency, match=r"agentenv-rl\[ifeval\]"):
        report([row], ["Guten Tag"])
    assert report([row], ["Привет"]).prompts == Accuracy(1, 0, 0)
