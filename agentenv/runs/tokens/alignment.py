"""Equal runs of two long sequences, in about linear time (`equal_runs`), and the gaps between them (`gaps_between`).

Equal ends are removed, items that occur once in both sequences split the rest (patience diff), and small parts are left
to difflib, whose time grows with the product of the lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

Run = tuple[int, int, int]
"""Start in the first sequence, start in the second, length."""
Gap = tuple[int, int, int, int]
"""A difference: [start, end) in the first sequence, [start, end) in the second."""
_SMALL = 40_000
"""Largest product of two lengths for difflib."""
_GRAMS = (16, 4, 1)
"""Lengths of n-grams to search for in both sequences, the most reliable first."""


def equal_runs(ours: Sequence[Any], theirs: Sequence[Any]) -> list[Run]:
    """Return the runs that are equal in both sequences, increasing in both, none touching the next in both.

    The sequences must have hashable slices: tuples or strings.
    """
    runs: list[Run] = []
    todo = [(0, len(ours), 0, len(theirs))]
    while todo:
        a, a_end, b, b_end = todo.pop()
        size = _common(ours, theirs, (a, b), min(a_end - a, b_end - b), 1)
        if size:
            runs.append((a, b, size))
            a, b = a + size, b + size
        size = _common(ours, theirs, (a_end - 1, b_end - 1), min(a_end - a, b_end - b), -1)
        if size:
            a_end, b_end = a_end - size, b_end - size
            runs.append((a_end, b_end, size))
        if a == a_end or b == b_end:
            continue
        if (a_end - a) * (b_end - b) <= _SMALL:
            matcher = SequenceMatcher(None, ours[a:a_end], theirs[b:b_end], autojunk=False)
            runs += [(a + run.a, b + run.b, run.size) for run in matcher.get_matching_blocks() if run.size]
            continue
        points = _anchors(ours[a:a_end], theirs[b:b_end])
        places = [(a, b), *((a + i, b + j) for i, j in points), (a_end, b_end)] if points else []
        todo += [(i, k, j, m) for (i, j), (k, m) in pairwise(places)]
    joined: list[Run] = []
    for a, b, size in sorted(runs):
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (a, b):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + size)
        else:
            joined.append((a, b, size))
    return joined


def gaps_between(runs: Sequence[Run], our_length: int, their_length: int) -> Iterator[Gap]:
    """Yield the gaps of two sequences of these lengths before, between and after their equal runs."""
    a = b = 0
    for i, j, size in [*runs, (our_length, their_length, 0)]:
        if (i, j) != (a, b):
            yield a, i, b, j
        a, b = i + size, j + size


def slid(gaps: Iterable[Gap], ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[Gap]:
    """Yield the gaps, with each gap in only one sequence moved towards the end as far as its items stay the same.

    With `a b a` and `a`, the gap is then the last two items: the text after the common beginning.
    """
    for (a, a_end, b, b_end), (a_next, _, b_next, _) in pairwise([*gaps, (len(ours), 0, len(theirs), 0)]):
        longer, start, end = (ours, a, a_end) if b == b_end else (theirs, b, b_end)
        most = min(a_next - a_end, b_next - b_end) if a == a_end or b == b_end else 0
        shift = 0
        while shift < most and longer[start + shift] == longer[end + shift]:
            shift += 1
        shift = 0 if shift == most else shift  # gaps must not touch
        yield a + shift, a_end + shift, b + shift, b_end + shift


def _common(ours: Sequence[Any], theirs: Sequence[Any], start: tuple[int, int], most: int, step: int) -> int:
    """Return the number of equal items from a start, in direction `step`."""
    size, (a, b) = 0, start
    while size < most and ours[a + step * size] == theirs[b + step * size]:
        size += 1
    return size


def _anchors(ours: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the positions of n-grams that occur once in both sequences; the longest chain increasing in both."""
    for gram in _GRAMS:
        once, other = _once(ours, gram), _once(theirs, gram)
        pairs = sorted((at, other[key]) for key, at in once.items() if key in other)
        if pairs:
            return _increasing(pairs)
    return []


def _once(items: Sequence[Any], gram: int) -> dict[Any, int]:
    """Return the position of each n-gram that occurs exactly once."""
    found: dict[Any, int] = {}
    for at in range(len(items) - gram + 1):
        key = items[at : at + gram]
        found[key] = -1 if key in found else at
    return {key: at for key, at in found.items() if at >= 0}


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest chain of pairs, sorted by the first item, that increases in the second."""
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for index, (_, at) in enumerate(pairs):
        place = bisect_left(ends, at)
        before.append(last[place - 1] if place else -1)
        ends[place : place + 1] = [at]
        last[place : place + 1] = [index]
    chain, index = [], last[-1]
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]
