"""Thinking, final text and the tokens that end a turn."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.rewards.registry import REWARDS, make_reward
from agentenv.rewards.rules.text import final_text, thought_text, with_opened_thought, without_special_tokens
from agentenv.rewards.types import Response, Status


@pytest.mark.parametrize(
    ("text", "final", "thought"),
    [
        ("<think>a</think>\n\nb", "b", "a"),
        ("a\n</think>b", "b", "a"),  # the template put <think> into the prompt
        ("b", "b", ""),
        ("", "", ""),
        ("<think>a", None, "a"),  # cut in its thought
        ("<think>a</think>b<think>c", None, "a"),
        ("<think>a</think>b<think>c</think>d", "d", "a"),
        ("<think></think>b", "b", ""),
        ("<thinking>a</thinking>b", "b", "a"),
        ("<seed:think>a", None, "a"),
        ("[THINK]a</think>b", None, "a</think>b"),
        ("<|channel>thought\na<channel|>b", "b", "a"),
        ("<|channel|>analysis<|message|>a", None, "a"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>", "b", "a"),
        ("b<|end|>", "b", ""),  # another model's end of a turn
        ("<think>No `</think>` yet: a", None, "No `</think>` yet: a"),
        ("The tag `<think>` opens, `<think>…</think>` is a thought.", ..., ""),
        ("```python\nTAG = 1  # <think>\n```\nb", ..., ""),
        ("<think>a</think>\n```xml\n<think>\n</think>\n```\nb", "```xml\n<think>\n</think>\n```\nb", "a"),
        ("```python\na\n</think>\nb", "b", "```python\na"),  # a thought with a block that nothing closed
    ],
)
def test_the_answer_stands_behind_the_last_thought(text, final, thought):
    assert (final_text(text), thought_text(text)) == (text if final is ... else final, thought)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("<｜Assistant｜><think>", "<think>"),
        ("[/INST][THINK]", "[THINK]"),
        ("<|im_start|>assistant\n<think>\nOkay, so", "<think>"),  # a turn that the response continues
        ([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>\nOkay"}], "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|im_start|>user\nUse <think> tags.<|im_end|>\n<|im_start|>assistant\n", ""),
        ("<|im_start|>assistant\n<think>cut<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", ""),
        ("Put it between <think> and the answer. Q", ""),
        ([{"role": "user", "content": "<think>"}], ""),
        ([], ""),
    ],
)
def test_a_prompt_opens_the_thought_of_its_response(prompt, opened):
    assert with_opened_thought("4", prompt) == f"{opened}4"
    assert with_opened_thought(f"\n{opened}4", prompt) == f"\n{opened}4"
    assert with_opened_thought("<thinking></thinking>4", prompt) == f"{opened}<thinking></thinking>4"
    assert final_text("4", prompt) == (None if opened else "4")
    assert final_text(f"5{opened.replace('[', '[/').replace('<', '</')}4", prompt) == ("4" if opened else "54")


ANSWERS = [
    ("math", "4", r"Perhaps \boxed{4}. But let me"),
    ("choice", "A", r"Perhaps \boxed{A}. But let me"),
    ("general_val", "4", r"Perhaps \boxed{4}. But let me"),
    ("crossthink_qa", "A", r"Perhaps \boxed{A}. But let me"),
    ("regex", "4", "Perhaps 4"),
    ("similarity", "4", "4"),
    ("json_schema", {}, "{}"),
    ("detection", [{"bbox_2d": [0, 0, 9, 9], "label": "cat"}], '[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}]'),
    ("ifeval", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, "Perhaps. But let me"),
    ("code", [{"stdin": "", "stdout": "4"}], "```python\nprint(4)\n```\nBut let me"),
]
"""For each reward that grades an answer: a label, and a right answer in a thought."""
FORMS = {"format", "tool_call_format", "length", "thought_length", "repetition"}
"""Rewards that grade all of the text."""


def test_every_reward_of_a_row_is_in_one_of_these_lists():
    assert {name for name, *_ in ANSWERS} == {name for name, entry in REWARDS.items() if entry.by_row} - FORMS


@pytest.mark.parametrize(("reward", "label", "text"), ANSWERS)
async def test_a_thought_without_an_end_is_no_answer_for_any_reward(reward, label, text):
    opened = Response(text, label, "Q<|im_end|>\n<|im_start|>assistant\n<think>\n")
    result = await make_reward(reward).grade(opened)
    assert (result.status, result.score) == (Status.NO_ANSWER, 0.0)


@pytest.mark.parametrize(
    "end",
    ["<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<end_of_turn>", "<pad>", "<eos>", "<｜end▁of▁sentence｜>"],
)
def test_the_end_of_a_turn_is_not_part_of_the_answer_in_any_models_spelling(end):
    assert final_text(f"7{end}\n{end} ") == "7"
    assert without_special_tokens(f"{end} 7") == f"{end} 7"


@given(st.text(alphabet="<>|/thinkseo \n", max_size=200))
def test_any_text_is_read(text):
    final = final_text(text)
    assert final is None or (final in text and without_special_tokens(final) == final)
    assert thought_text(text) in text


def test_reading_is_linear_in_the_texts_length():
    started = time.process_time()
    assert without_special_tokens("</s>" * 1_000_000) == ""
    for text in ("<|x|>" * 400_000, "<think>" * 400_000, "</think>" * 400_000, "<" * 2_000_000):
        final_text(text), thought_text(text)
    assert time.process_time() - started < 30.0  # some 0.1 s; quadratic time would take minutes
