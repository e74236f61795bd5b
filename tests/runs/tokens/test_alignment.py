"""Alignment of long sequences: what is equal, whatever was changed, and in time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.runs.tokens import alignment
from agentenv.runs.tokens.alignment import equal_runs, gaps_between, slid

NUM = 30_000
sequences = st.lists(st.integers(0, 6), max_size=40).map(tuple) | st.text("abc \n", max_size=40)


def check(ours, theirs):
    runs = equal_runs(ours, theirs)
    a = b = 0
    for i, j, size in runs:
        assert size > 0
        assert i >= a
        assert j >= b
        assert (i, j) != (a, b) or (a, b) == (0, 0), "runs that touch are one"
        assert ours[i : i + size] == theirs[j : j + size]
        a, b = i + size, j + size
    gaps = list(gaps_between(runs, len(ours), len(theirs)))
    parts = sorted([(a, a + size, b, b + size) for a, b, size in runs] + gaps)
    assert [part[0] for part in parts] + [len(ours)] == [0] + [part[1] for part in parts]
    assert [part[2] for part in parts] + [len(theirs)] == [0] + [part[3] for part in parts]
    check_slid(ours, theirs, gaps)
    return runs


def check_slid(ours, theirs, gaps):
    moved, a, b = list(slid(gaps, ours, theirs)), 0, 0
    assert [(end - start, to - at) for start, end, at, to in moved] == [(e - s, t - f) for s, e, f, t in gaps]
    for index, (start, end, at, to) in enumerate(moved):
        assert ours[a:start] == theirs[b:at], "what is between the gaps is equal"
        assert start > a or index == 0
        a, b = end, to
    assert ours[a:] == theirs[b:]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("a|bc|bd", "a|bd", [(3, 6, 3, 3)]),
        ("\n<think>\nx", "\nx", [(1, 9, 1, 1)]),
        ("\nx", "\n<think>\nx", [(1, 1, 1, 9)]),
        ("xab", "xcb", [(1, 2, 1, 2)]),
        ("aab", "ab", [(1, 2, 1, 1)]),
    ],
)
def test_what_is_missing_is_moved_back_as_far_as_it_can_be(ours, theirs, expected):
    gaps = gaps_between(equal_runs(ours, theirs), len(ours), len(theirs))
    assert list(slid(gaps, ours, theirs)) == expected


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(ours=sequences, theirs=sequences, small=st.sampled_from([0, 30, 40_000]))
def test_runs_are_equal_and_increase_in_both(ours, theirs, small):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "_SMALL", small)
        check(ours, theirs if type(ours) is type(theirs) else ours)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 4_990), st.integers(0, 8)), max_size=8), seed=st.integers(0, 99))
def test_a_few_edits_of_a_long_sequence_leave_the_rest_equal(edits, seed):
    rng = random.Random(seed)
    ours = tuple(rng.randrange(2_000) for _ in range(5_000))
    theirs = list(ours)
    for at, size in edits:
        theirs[at : at + size] = [-1]
    equal = sum(size for _, _, size in check(ours, tuple(theirs)))
    assert equal >= len(ours) - sum(max(size, 1) for _, size in edits)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((1,) * NUM, (1,) * (NUM - 7) + (2, 1)),
        (tuple(random.Random(0).choices(range(5), k=NUM)), tuple(random.Random(1).choices(range(5), k=NUM))),
        (tuple(random.Random(0).choices(range(50_000), k=NUM)), tuple(random.Random(1).choices(range(50_000), k=NUM))),
        ((1, 2, 3) * (NUM // 3), (1, 2, 4) * (NUM // 3)),
    ],
    ids=["one token", "few kinds", "nothing alike", "periodic"],
)
def test_the_worst_sequences_of_30k_tokens_are_aligned(ours, theirs):
    check(ours, theirs)
