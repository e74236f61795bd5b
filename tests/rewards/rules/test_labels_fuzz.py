"""Damaged labels and columns: a reward, or an error in the data that says what is wrong, never a failure to retry."""

import asyncio
import json
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.rewards import registry
from agentenv.rewards.grading import grade
from agentenv.rewards.registry import make_reward
from agentenv.rewards.types import Response, Status
from tests.damage import check_message, damaged

ROWS = Path(__file__).parent / "ifeval/rows.jsonl"
BOX = {"bbox_2d": [10, 10, 90, 90], "label": "cat"}
INSTRUCTIONS = [json.loads(line) for line in ROWS.read_text().splitlines()]
SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}, "b": {"pattern": "x+"}}}
CHOICES = [
    {"label": "B", "options": ["Rome", "Paris"]},
    {"label": 1, "options": {"A": "Rome", "B": "Paris"}, "tag": "ceval"},
    {"label": "Paris", "options": {"label": ["A", "B"], "text": ["Rome", "Paris"]}},
]
RIGHT = {
    "ifeval": [
        *({name: row[name] for name in ("instruction_id_list", "kwargs")} for row in INSTRUCTIONS[:12]),
        {"label": json.dumps({"func_name": "validate_word_constraint", "N": 5, "quantifier": "at least"})},
    ],
    "json_schema": [{"label": json.dumps(SCHEMA)}, {"schema": SCHEMA}],
    "regex": [{"label": r"(?i)b+\w"}],
    "choice": CHOICES,
    "general_val": CHOICES,
    "crossthink_qa": CHOICES,
    "math": [{"label": "1/2"}, {"label": [r"\boxed{\frac{1}{2}}", 0.5]}, {"label": "so it is\n#### 42"}],
    "detection": [
        {"label": [BOX], "image_size": [100, 100]},
        {"label": json.dumps({"ground_truth": json.dumps([[BOX], [BOX]]), "format_ratio": 0.5})},
        {"reward_model": {"ground_truth": [BOX], "verifier_parm": {"det_reward_ratio": {"map50": 1.0},
                                                                   "det_verifier_normalized": True}},
         "image_size": [[100, 100]], "global_step": 5, "max_steps": 10},
    ],
    "similarity": [{"label": ["a text", "another text"]}],
    "length": [{"num_tokens": 5}],
}  # fmt: skip
TEXTS = (
    r"So \boxed{B}", '{"a": 1, "b": "x"}', r"\boxed{\frac{1}{3}}", "a text", json.dumps([BOX]),
    f"<answer>{json.dumps([BOX])}</answer>",
)  # fmt: skip
REWARDS = {name: make_reward(name) for name in RIGHT}
cases = st.sampled_from(sorted(RIGHT)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.sampled_from(RIGHT[name]).flatmap(lambda row: damaged(row, others=RIGHT[name]))
    )
)


@pytest.fixture(scope="module")
def run():
    """Run coroutines on one event loop, whose worker processes are shared."""
    with asyncio.Runner() as runner:
        yield runner.run


def is_graded_or_refused(run, name, row, text):
    row = row if isinstance(row, dict) else {"label": row}
    metadata = {str(key): value for key, value in row.items() if key != "label"}
    result = run(grade(REWARDS[name], Response(text, row.get("label"), metadata=metadata)))
    assert result.status not in (Status.INFRA, Status.ERROR), result.detail
    if result.status is Status.LABEL:
        check_message(result.detail)


@pytest.mark.parametrize("name", RIGHT)
def test_right_rows_are_graded(run, name):
    for row in RIGHT[name]:
        is_graded_or_refused(run, name, row, TEXTS[0])


DEEP = reduce(lambda inner, _: [inner], range(5000), "1")
FOUND = [
    *(({"label": None}, name) for name in RIGHT),
    *(({"label": DEEP, "options": ["Rome", "Paris"]}, name) for name in RIGHT),
    *(({"label": {"a": DEEP}, "options": DEEP}, name) for name in RIGHT),
    ({"instruction_id_list": DEEP}, "ifeval"),
    ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": DEEP}, "ifeval"),
    ({"func_name": "validate_word_constraint", "N": DEEP, "quantifier": "at least"}, "ifeval"),
    ({"label": [BOX], "image_size": DEEP}, "detection"),
    ({"schema": {"type": "x" * 3000}}, "json_schema"),
    ({"label": "(?\n)"}, "regex"),
    ({"label": "A", "options": {"label": ["A", "B", "A", "B"], "text": ["Rome", "Paris"]}}, "choice"),
    ({"schema": {"a": DEEP}}, "json_schema"),
]
"""Rows that the fuzzer found."""


@pytest.mark.parametrize(("row", "name"), FOUND, ids=[name for _, name in FOUND])
def test_a_row_that_the_fuzzer_found_is_graded_or_is_the_datas_error(run, row, name):
    is_graded_or_refused(run, name, row, TEXTS[0])


@pytest.mark.long
@given(cases, st.sampled_from(TEXTS))
@settings(max_examples=300)
def test_a_damaged_row_of_any_reward_is_graded_or_is_the_datas_error(run, case, text):
    is_graded_or_refused(run, *case, text)


PIECES = (
    r"\boxed{", "}", "{", "B", "a ", " or ", "the answer is ", "(", ".", "<think>", "</think>", "<answer>", "</answer>",
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "```json\n", "\n```", '{"a": 1}', "Paris", "天",
    "Ｂ", " not ", "答案是", "\n", "<|im_end|>", "\ud800", "\x00",
)  # fmt: skip
RULES = RIGHT | {
    name: [{}] for name in ("format", "tool_call_format", "length", "thought_length", "overlong", "repetition")
}


def test_every_rule_but_code_which_runs_programs_is_fuzzed():
    assert RULES.keys() | {"code"} == {
        name for name, entry in registry.REWARDS.items() if entry.path.startswith("rules.")
    }


@pytest.mark.long
@given(st.sampled_from(sorted(RULES)), st.text() | st.lists(st.sampled_from(PIECES), max_size=15).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_has_the_same_result_within_bounds(run, name, text):
    options = {"max_length": 20, "buffer": 7, "count": len} if name == "overlong" else {}
    reward, row = make_reward(name, **options), {**RULES[name][0]}
    response = Response(text, row.pop("label", None), metadata=row)
    first, second = run(reward.grade(response)), run(reward.grade(response))
    assert first == second
    assert first.status.valid
    assert reward.bounds[0] <= first.reward <= reward.bounds[1]
