"""Reading answers and labels out of text: tables of forms, properties, and hostile inputs."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentenv.errors import DataError
from agentenv.rewards.rules.math.answers import (
    extract_answer,
    extract_boxes,
    numbers_equal,
    parse_label,
    plain_verdict,
    read_number,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{6} no wait \boxed{5}", "5"),
        ("The answer is 5. Or 6.", "5. Or 6"),
        ("The answer is 5. Or so they say.", "5"),
        (r"\boxed{\frac{1}{2}} or \boxed{6", r"\frac{1}{2}"),
        ("<answer>4</answer> no, <answer>5</answer> is it", "5"),
        ("The answer: B) 12", "B) 12"),
        (r'\boxed{5"} tall', "5"),
        (r"<think>a</think> \boxed{1} <think>b</think> \boxed{2}", "2"),
        ("#### 41\nwork\n#### 42<|im_end|>\n<|endoftext|>", "42"),
        ("#### Step 1\nadd\n#### Step 2\nThe answer is 7", "7"),
        ("The answer is **$18** per day", "18"),
        (r"The answer is \(x = 5\).", "x = 5"),
    ],
)
def test_extracts_the_final_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("written", "cleaned"),
    [
        (r"42\text{ apples}", "42"),
        ("5/x", "5/x"),
        ("12 cm^2", "12"),
        (r"\$1,234.50", "1234.50"),
        ("$1{,}234", "1234"),
        ("\u22125", "-5"),
        ("50%", "50%"),
        ("3.5 million dollars", "3500000"),
        (r"\text{Monday}", "Monday"),
        ("1½", "1 1/2"),
        # not a number with a unit, so left alone
        ("5 or 6", "5 or 6"),
        ("2 x", "2 x"),
    ],
)
def test_cleans_markup_units_and_separators(written, cleaned):
    assert extract_answer(f"\\boxed{{{written}}}") == cleaned


@pytest.mark.parametrize(
    ("label", "golds"),
    [
        ("so 6*7=<<6*7=42>>42\n#### 42", ("42",)),
        ("#### 1,234", ("1234",)),
        (42, ("42",)),
        (Decimal("2.50"), ("2.50",)),
        (Fraction(1, 3), ("1/3",)),
        (r"Thus \boxed{\frac12}.", (r"\frac12",)),
        (["5", 5, "five"], ("5", "five")),
        (("5 km", ["6"]), ("5", "6")),
    ],
)
def test_parses_labels(label, golds):
    assert parse_label(label) == golds


@pytest.mark.parametrize(
    "label",
    [None, "", "  ", "$$", "####", [], [[]], ["5", None], {}, True, float("nan"), float("inf"), "x" * 5000, b"5"],
)
def test_a_label_without_an_answer_is_a_data_error(label):
    with pytest.raises(DataError, match=r"^label: expected .*, got .*\. Write the gold") as caught:
        parse_label(label)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-5", -5),
        ("1,234,567.5", "2469135/2"),
        ("1.5e-2", "3/200"),
        ("3/4", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        ("1 2/3", "5/3"),
        (r"-1 \frac{2}{3}", "-5/3"),
    ],
)
def test_reads_numbers_exactly(text, value):
    number = read_number(text)
    assert number is not None
    assert number.value == Fraction(value)


@pytest.mark.parametrize("text", ["", "5 6", "1,23", "0,111", "1/0", "1e9999999999", "--5", "5%%", "1" * 500, "²"])
def test_does_not_read_what_is_not_a_plain_number(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1/3", "0.333333", True),
        ("1/3", "0.333", False),
        ("0.333", "1/3", True),
        ("0.333", "0.3333", False),
        ("2.000", "20001/10000", False),
        ("1.414214", "1.4142136", True),
        ("0.0000001", "0.0000002", False),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("50", "0.5", False),
        ("100000000000000000000", "100000000000000000001", False),
    ],
)
def test_compares_numbers(gold, answer, equal):
    gold_number, number = read_number(gold), read_number(answer)
    assert gold_number is not None
    assert number is not None
    assert numbers_equal(gold_number, number) is equal


def test_words_match_without_case_and_spaces_but_not_as_anagrams():
    assert plain_verdict("monday", "Monday")
    assert plain_verdict("No  Solution.", "no solution")
    assert plain_verdict("dayMon", "Monday") is False
    assert not plain_verdict("X", "x")


NUMBERS = st.integers(-(10**9), 10**9)


def forms(number: int) -> list[str]:
    return [f"{number}", f"{number:,}", f"{number}.0", f"{number}.", rf"\frac{{{number * 2}}}{{2}}", f"{number * 3}/3"]


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(NUMBERS, st.integers(-1, 1), st.data())
def test_the_fast_path_only_accepts_what_math_verify_accepts(number, delta, data):
    from math_verify import LatexExtractionConfig, parse, verify

    gold = data.draw(st.sampled_from(forms(number)))
    answer = data.draw(st.sampled_from(forms(number + delta)))
    assume(plain_verdict(extract_answer(f"\\boxed{{{answer}}}"), *parse_label(gold)))
    golds, answers = (
        parse(f"${text.removesuffix('.')}$", [LatexExtractionConfig()], parsing_timeout=None) for text in (gold, answer)
    )
    assert verify(golds, answers, strict=True, timeout_seconds=None)


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "\\boxed{1}", "}", "\n", "#### a\n", "answer is ", "answer to ", "<answer>", "</think>", "<|", "1,",
     r"\boxed{\{x \in R : " + "<" * 15_000 + "}} "],
    ids=lambda piece: piece[:10],
)  # fmt: skip
@pytest.mark.parametrize("frame", ["{}", "\\boxed{{{}}}", "answer: 5 {}"])
def test_hostile_text_is_read_in_linear_time(piece, frame):
    text = frame.format(piece * (1_000_000 // len(piece)))
    started = time.process_time()
    answer = extract_answer(text)
    extract_boxes(text)
    if answer is not None:
        read_number(answer)
    assert time.process_time() - started < 30.0  # some 20 ms; quadratic time would take minutes
