"""What is read from a judge's reply: a verdict, or nothing. The defects are ROLL's LLM judge's."""

import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.rewards.judges.pointwise import read_shares
from agentenv.rewards.judges.templates import (
    quote_text,
    read_list,
    read_preference,
    read_ranking,
    read_score,
    read_yes_or_no,
)
from tests.rewards.judges.test_judge_rewards import THREE


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("YES", True),
        ("Verdict: YES", True),
        ("It says four.\n**Verdict:** *yes*.\n", True),
        (r"\boxed{yes}", True),
        (r"So $\boxed{\text{No}}$.", None),
        ('```json\n{"reason": "no, it is not", "verdict": "YES"}\n```', True),
        ("<think>yes, or no? yes</think>Verdict: NO", False),
        ("NO. I cannot say yes", False),
        ("No, and I mean no: no.", False),
        ("Yes\nIt is four.", True),
        ("No. On reflection:\nVerdict: YES", None),
        ("Yes\n\nVerdict: unclear", None),
        ("No doubt it is right", None),
        ("Verdict: YES\nbut I am not sure", None),
        ('{"verdict": "yes", "score": 3}', None),
        ('{"verdict": "yes"', None),
        ("<thinking>\nVerdict: YES", None),
        ("It has a <reasoning> tag.\nVerdict: YES", True),
        ("Verdict：YES", True),
        ("1. yes\n2. no", None),
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
        (r"\boxed{7}", 7),
        ('{"score": 7}', 7),
        ('{"score": "7/10"}', 7),
        ("Score: 11/10", None),
        ("- 7", 7),
        ("-7", None),
        ("Score：7/10", 7),
        ("Score: 7/100", None),
        ("Between 6 and 7", None),
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
        ("A is good, B better.\n\nVerdict: **B**", 0.0),
        ("Verdict: TIE.", 0.5),
        ('{"winner": "A"}', 1.0),
        ("Verdict: Response B", 0.0),
        ("Both are fine.\n\n[[C]]", 0.5),
        ("My final verdict is tie: [[C]]", None),
        ("[[C]]\nVerdict: unclear", None),
    ],
)
def test_preferences(reply, points):
    assert read_preference(reply) == points


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("Ranking: [2] > [1] > [3]", [2, 1, 3]),
        ("Ranking: 2 > 1", None),
        ("Ranking: 2 > 1 > 1", None),
        ("Ranking: 2 > 1 > none > 3", None),
        ('{"ranking": "2 > 1 > 3"}', [2, 1, 3]),
        ("Ranking: 0 > 1 > 2", None),
        ("Ranking: 2 > 1 > 3\nor the other way", None),
        ("", None),
    ],
)
def test_rankings_name_each_once(reply, found):
    assert read_ranking(reply, 3) == found


READERS = (
    read_yes_or_no,
    partial(read_score, low=0, high=10),
    read_preference,
    partial(read_ranking, number=3),
    partial(read_list, number=3),
    partial(read_shares, criteria=THREE),
    partial(quote_text, "x"),
)


@given(st.text(max_size=300) | st.text(alphabet='123: yesno/.\n{}"', max_size=60))
def test_no_reply_raises_or_is_read_as_two_verdicts(reply):
    assert read_yes_or_no(reply) in (True, False, None)
    assert read_score(reply, 0, 10) is None or 0 <= read_score(reply, 0, 10) <= 10
    assert read_preference(reply) in (0.0, 0.5, 1.0, None)
    assert read_ranking(reply, 2) in ([1, 2], [2, 1], None)
    read_list(reply, 2)
    shares = read_shares(reply, THREE)
    assert shares is None or (len(shares) == 3 and all(0 <= value <= 1 for value in shares))


@pytest.mark.parametrize(
    "unit",
    ["[", "* ", "verdict ", "<|", "\\boxed{", '{"1":', "</think>", "yes ", " \r", "yes\u2028", "\n1. ", "1: YES\n"],
)
def test_hostile_texts_are_read_in_linear_time(unit):
    text = unit * (600_000 // len(unit))
    started = time.process_time()
    for read in READERS:
        read(text)
    assert time.process_time() - started < 30.0  # some 0.1 s; quadratic time would take minutes
