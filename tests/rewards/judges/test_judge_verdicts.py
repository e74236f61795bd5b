"""What is read from a judge's reply: a verdict, or nothing. The defects are ROLL's LLM judge's."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.rewards.judges.templates import (
    quote_text,
    read_list,
    read_preference,
    read_ranking,
    read_score,
    read_yes_or_no,
)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("YES", True),
        ("**Yes**", True),
        ("Verdict: YES", True),
        ("It says four.\n**Verdict:** *yes*.\n", True),
        ("My judgment is: no", False),
        (r"\boxed{yes}", True),
        (r"So $\boxed{\text{No}}$.", None),
        ('{"verdict": "yes"}', True),
        ('```json\n{"reason": "no, it is not", "verdict": "YES"}\n```', True),
        ("<think>yes, or no? yes</think>Verdict: NO", False),
        ("NO. I cannot say yes", False),
        ("Yes. No.", None),
        ("No, it is four. So: **yes**", None),
        ("No, and I mean no: no.", False),
        ("Yes\nIt is four.", True),
        ("No. On reflection:\nVerdict: YES", None),
        ("Yes\n\nVerdict: unclear", None),
        ("yes/no", None),
        ("No doubt it is right", None),
        ("yesterday", None),
        ("Verdict: YES\nbut I am not sure", None),
        ('{"verdict": "yes", "score": 3}', None),
        ('{"verdict": "yes"', None),
        ("<think>yes", None),
        ("<thinking>\nVerdict: YES", None),
        ("[THINK]Verdict: YES", None),
        ("<reasoning>no</reasoning>Yes.", True),
        ("It has a <reasoning> tag.\nVerdict: YES", True),
        ("Verdict：YES", True),
        ("> ### Verdict: NO", False),
        ("1. yes\n2. no", None),
        ("Conclusion: **NO**。", False),
        ('{"verdict": "yes", "verdict": "no"}', None),
        ("", None),
    ],
)
def test_yes_or_no(reply, verdict):
    assert read_yes_or_no(reply) is verdict


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7/10", 7),
        ("Rating: [[7]]", 7),
        ("7", 7),
        ("**7.5**", 7.5),
        (r"\boxed{7}", 7),
        ('{"score": 7}', 7),
        ('{"score": "7/10"}', 7),
        ("Score: 11/10", None),
        ("Score: -1", None),
        ("- 7", 7),
        ("-7", None),
        ("Score：7/10", 7),
        ("Score: 7/100", None),
        ("Between 6 and 7", None),
        ("Score: nan", None),
        ("Score: ٧", None),
        ('{"score": true, "verdict": "no"}', None),
        ("Score: 7/10\nor so", None),
        ("", None),
    ],
)
def test_scores(reply, score):
    assert read_score(reply, 0, 10) == score


@pytest.mark.parametrize(
    ("reply", "points"),
    [
        ("Verdict: A", 1.0),
        ("[[B]]", 0.0),
        ("A is good, B better.\n\nVerdict: **B**", 0.0),
        ("Verdict: TIE.", 0.5),
        ('{"winner": "A"}', 1.0),
        ("Verdict: Response B", 0.0),
        ("A is better", None),
        ("Verdict: A and B", None),
        ("C", None),
        ("Both are fine.\n\n[[C]]", 0.5),
        ("My final verdict is tie: [[C]]", None),
        ("[[C]]\nVerdict: unclear", None),
        ("A\nB is also fine", None),
    ],
)
def test_preferences(reply, points):
    assert read_preference(reply) == points


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("Ranking: [2] > [1] > [3]", [2, 1, 3]),
        ("2 > 1 > 3", [2, 1, 3]),
        ("Ranking: 2 > 1", None),
        ("Ranking: 2 > 1 > 1", None),
        ("Ranking: 2 > 1 > none > 3", None),
        ('{"ranking": "2 > 1 > 3"}', [2, 1, 3]),
        ("Ranking: 2 > 1 = 3", None),
        ("Ranking: 2 > 1 > 3 > 4", None),
        ("Ranking: 0 > 1 > 2", None),
        ("Ranking: 2 > 1 > 3\nor the other way", None),
        ("none", None),
        ("", None),
    ],
)
def test_rankings_name_each_once(reply, found):
    assert read_ranking(reply, 3) == found


@given(st.text(max_size=300))
def test_no_reply_raises_or_is_read_as_two_verdicts(reply):
    assert read_yes_or_no(reply) in (True, False, None)
    assert read_score(reply, 0, 10) is None or 0 <= read_score(reply, 0, 10) <= 10
    assert read_preference(reply) in (0.0, 0.5, 1.0, None)
    assert read_ranking(reply, 2) in ([1, 2], [2, 1], None)
    read_list(reply, 2)


@pytest.mark.parametrize(
    "unit",
    ["[", "* ", "verdict ", "<|", "\\boxed{", '{"a":', "1,", "</think>", "yes ", " \r", "yes\u2028", "\n1. "],
)
def test_hostile_texts_are_read_in_linear_time(unit):
    text = unit * (600_000 // len(unit))
    started = time.process_time()
    for read in (
        read_yes_or_no,
        lambda reply: read_score(reply, 0, 10),
        read_preference,
        lambda reply: read_ranking(reply, 3),
        lambda reply: read_list(reply, 3),
        lambda reply: quote_text("x", reply),
    ):
        read(text)
    assert time.process_time() - started < 30.0  # some 0.1 s; quadratic time would take minutes
