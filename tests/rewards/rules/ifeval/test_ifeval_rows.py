"""Rows: both forms, in labels and columns, as JSON or not; and one clear line for what cannot be read."""

import copy
import json

import numpy as np
import pytest

from agentenv.errors import DataError
from agentenv.rewards.rules.ifeval.reward import IFEvalReward, instructions_of
from agentenv.rewards.types import Response

BY_NAME = {"func_name": "validate_word_constraint", "N": 3, "quantifier": "at least", "letter": None, "options": None}
BY_ID = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least", "keyword": None}],
}


def names(label, columns=None):
    return [(each.name, dict(each.params)) for each in instructions_of(label, columns or {})]


WORDS = [("validate_word_constraint", {"N": 3, "quantifier": "at least"})]
TWO = [("punctuation:no_comma", {}), ("length_constraints:number_words", {"num_words": 3, "relation": "at least"})]


@pytest.mark.parametrize("label", [BY_NAME, json.dumps(BY_NAME), [BY_NAME], json.dumps([BY_NAME])])
def test_a_function_by_name_in_a_label(label):
    assert names(label) == WORDS


@pytest.mark.parametrize("label", [BY_ID, json.dumps(BY_ID), {**BY_ID, "kwargs": json.dumps(BY_ID["kwargs"])}])
def test_instructions_by_id_in_a_label(label):
    assert names(label) == TWO


@pytest.mark.parametrize("label", [None, "", "42", "no json {", 42, [], {"answer": "x"}, {"func_name": None}])
def test_columns_are_read_where_the_label_holds_no_instruction(label):
    assert names(label, BY_ID) == TWO
    assert names(label, {**BY_NAME, "instruction_id_list": None}) == WORDS


def test_a_label_that_holds_instructions_goes_before_the_columns():
    assert names(BY_NAME, BY_ID) == WORDS
    assert names(BY_ID, BY_NAME) == TWO


def test_arrays_and_whole_floats_of_tables_are_read():
    row = {
        "instruction_id_list": np.array(["keywords:existence", "keywords:frequency"], dtype=object),
        "kwargs": np.array(
            [{"keywords": np.array(["a"], dtype=object)}, {"keyword": "b", "frequency": 2.0, "relation": "at least"}]
        ),
    }
    assert names(None, row) == [
        ("keywords:existence", {"keywords": ["a"]}),
        ("keywords:frequency", {"keyword": "b", "frequency": 2, "relation": "at least"}),
    ]
    assert names({"func_name": "verify_bullet_points", "N": np.int64(3)}) == [("verify_bullet_points", {"N": 3})]


def test_the_quantifier_of_an_exact_count_may_be_left_out():
    row = {"func_name": "verify_letter_frequency", "letter": "a", "N": 2}
    assert names(row) == [("verify_letter_frequency", {"letter": "a", "N": 2})]


def test_zero_kwargs_are_zero_parameters():
    assert names({"instruction_id_list": ["punctuation:no_comma"]}) == [("punctuation:no_comma", {})]
    assert names({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}) == [("punctuation:no_comma", {})]


@pytest.mark.parametrize("label", [BY_NAME, BY_ID])
async def test_the_callers_dict_is_never_changed_so_a_group_can_share_it(label):
    mine = copy.deepcopy(label)
    reward = IFEvalReward()
    results = [await reward.grade(Response("one two three", label=mine)) for _ in range(3)]
    assert [result.reward for result in results] == [1.0] * 3
    assert mine == label


@pytest.mark.parametrize(("label", "message"), [
    (None, "label: expected IFEval's"),
    (np.array(1), "label: expected IFEval's"),
    ({"func_name": "no_such"}, "instruction: expected one of keywords:existence"),
    ({"instruction_id_list": ["no:such"], "kwargs": [{}]}, "got 'no:such'"),
    ({"instruction_id_list": [], "kwargs": []}, "kwargs: expected one entry"),
    ({"instruction_id_list": "punctuation:no_comma", "kwargs": [{}]}, "kwargs: expected one entry"),
    ({"instruction_id_list": ["keywords:existence"], "kwargs": [["a"]]}, "keywords:existence: expected its parameters"),
    ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "keywords:existence.keywords: expected a list"),
    ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["a", ""]}]}, "keywords: expected a list"),
    ({"func_name": "verify_bullet_points", "N": None}, "verify_bullet_points.N: expected a whole number"),
    ({"func_name": "verify_bullet_points", "N": True}, "got True"),
    ({"func_name": "verify_bullet_points", "N": -1}, "got -1"),
    ({"func_name": "verify_bullet_points", "N": float("nan")}, "got nan"),
    ({"func_name": "verify_bullet_points", "N": 10**30}, "verify_bullet_points.N"),
    ({"func_name": "verify_letter_frequency", "letter": "ab", "N": 1}, "frequency.letter: expected a single"),
    ({"func_name": "validate_word_constraint", "N": 1, "quantifier": "some"}, "quantifier: expected one of at least"),
    ({"func_name": "validate_paragraphs", "N": 1, "first_word": "a", "i": 0}, "i: expected a whole number of 1.."),
    ({"func_name": "validate_response_language", "language": "Klingon"}, "language: expected the code of a language"),
    ({"func_name": "validate_choice", "options": "(1, 2)"}, "options: expected a list of texts"),
    ({"func_name": "validate_choice", "options": "[[]]"}, "got '[[]]'"),
    ({"func_name": "validate_end", "end_phrase": "  "}, "end_phrase: expected a text that is not blank"),
])  # fmt: skip
async def test_anything_that_cannot_be_read_is_named(label, message):
    with pytest.raises(DataError) as caught:
        await IFEvalReward().grade(Response("text", label=label))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 2500
