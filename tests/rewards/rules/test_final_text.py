"""Thinking, final text and the tokens that end a turn."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.rewards.rules.text import final_text, thought_text, without_special_tokens


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
    ],
)
def test_the_answer_stands_behind_the_last_thought(text, final, thought):
    assert (final_text(text), thought_text(text)) == (final, thought)


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


def test_megabytes_of_terminators_are_peeled_in_linear_time():
    text = "</s>" * 1_000_000
    started = time.process_time()
    assert without_special_tokens(text) == ""
    assert time.process_time() - started < 30.0  # some 0.1 s; quadratic time would take minutes


def test_reading_is_linear_in_the_texts_length():
    started = time.process_time()
    for text in ("<|x|>" * 400_000, "<think>" * 400_000, "</think>" * 400_000, "<" * 2_000_000):
        final_text(text), thought_text(text)
    assert time.process_time() - started < 30.0  # some 0.1 s; quadratic time would take minutes
