"""What a policy may write: any text gives a bool for any instruction, in time linear in its length."""

import contextlib
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import MissingDependency
from agentenv.rewards.rules.ifeval.reward import RULES, Instruction, check_text
from agentenv.rewards.rules.ifeval.rules import (
    COUNT,
    LANGUAGE,
    LETTER,
    OPTIONS,
    PLACE,
    RELATION,
    RELATIONS,
    TEXT,
    TEXTS,
)

WORDS = ("a", "SECTION", "P.S.", "P.P.S", "cat+", "The end.", "***", '"', "ß", "İ", "\\", "(", "[a", "日本")
VALUES = {
    COUNT: st.integers(0, 5),
    PLACE: st.integers(1, 5),
    TEXT: st.sampled_from(WORDS),
    LETTER: st.sampled_from(["a", "A", "#", "*", "ß", "\\"]),
    TEXTS: st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    OPTIONS: st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    RELATION: st.sampled_from(sorted(RELATIONS)),
    LANGUAGE: st.sampled_from(["th", "ko", "en", "zh"]),
}
PIECES = (
    *WORDS, " ", "\n", "\n\n", "\r\n", "*", "**", "******", "* * *", "- ", "---", "<<", ">>", "[", "]", "{}", "```json",
    "```", ".", "...", "!", "?", ",", "1.", "2", "My answer is yes.", "SECTION 1", "\x00", "\ud800", "\u2028", "สวัสดี",
    "안녕", "'S", "’", "_", "é", "e\u0301", "\u200b", "NaN", '{"a": ', "😀",
)  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)


@st.composite
def instructions(draw):
    name = draw(st.sampled_from(sorted(RULES)))
    rule = RULES[name]
    kinds = {**rule.params, **{key: kind for key, kind in rule.optional.items() if draw(st.booleans())}}
    return Instruction(name, {key: draw(VALUES[kind]) for key, kind in kinds.items()})


@pytest.mark.long
@given(texts, instructions())
@settings(max_examples=300, deadline=None)
def test_any_text_and_instruction_give_a_bool_and_loose_allows_what_strict_does(text, instruction):
    try:
        (strict,) = check_text([instruction], text, "strict")
        (loose,) = check_text([instruction], text, "loose")
    except MissingDependency:
        return
    assert type(strict) is bool
    assert type(loose) is bool
    assert loose or not strict
    assert not (strict and not text.strip())


BLANK = "\u200b\u2060\u2800\u3164"
LOOKS_EMPTY = [
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[%s]"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*%s*"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "**%s**"),
    ("validate_highlighted_sections", {"N": 1}, "**%s**"),
    ("detectable_format:title", {}, "<<%s>>"),
    ("startend:quotation", {}, '"%s"'),
    ("validate_quotation", {}, '"%s"'),
    ("combination:two_responses", {}, "a******%s"),
    ("combination:two_responses", {}, "a******a%s"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a***%s"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a"},
        "a\n\n%s",
    ),
    ("validate_paragraphs", {"N": 2, "first_word": "a", "i": 1}, "a\n\n%s"),
    ("verify_bullet_points", {"N": 1}, "* %s"),
    ("length_constraints:number_words", {"num_words": 2, "relation": "at least"}, "a %s"),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, "a %s"),
    ("punctuation:no_comma", {}, "%s"),
]


@pytest.mark.parametrize(("name", "params", "text"), LOOKS_EMPTY)
def test_what_shows_nothing_is_empty_as_a_space_is(name, params, text):
    instruction = Instruction(name, params)
    assert not any(instruction.followed_by(text % blank) for blank in [*BLANK, BLANK, " "])
    assert instruction.followed_by(text % "b c")


LENGTH = 300_000
HOSTILE = (
    "*", "**a ", "***a\n", "<<a", "1. ", ".", '."', "\n", "\n ", "[a", "- ", "SECTION ", '{"a":', "\n> *_# ", "か漢",
)  # fmt: skip
PARAMS = {
    COUNT: 3, PLACE: 2, TEXT: "SECTION", LETTER: "a", TEXTS: ["yes", "SECTION 1"], OPTIONS: ["yes", "no"],
    RELATION: "around", LANGUAGE: "th",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("piece", HOSTILE, ids=ascii)
def test_every_check_is_linear_on_long_hostile_text(piece):
    text = (piece * LENGTH)[:LENGTH] + "x"
    started_s = time.process_time()
    for name, rule in RULES.items():
        instruction = Instruction(name, {key: PARAMS[kind] for key, kind in rule.params.items()})
        with contextlib.suppress(MissingDependency):
            check_text([instruction], text, "strict")
        assert time.process_time() - started_s < 30.0, name  # some 2 s for all; quadratic time would take minutes


def test_deeply_nested_json_does_not_crash():
    deep = Instruction("detectable_format:json_format", {})
    assert check_text([deep], "[" * (10 * sys.getrecursionlimit()), "strict") == [False]
    assert check_text([deep], "9" * 200_000, "strict") == [True]
