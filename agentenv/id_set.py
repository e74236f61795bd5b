"""IdSet: which episodes are finished, in a few ranges instead of a text each."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set

_COUNTED = re.compile(r"(.*?)([0-9]+)(/[0-9]+)?", re.DOTALL)
_Family = tuple[str, int, str]
"""Ids that differ in their number only: what stands before it, how many digits it has, what follows."""


class IdSet(Set[str]):
    """A set of ids that only grows.

    Ids that count on, such as 000007/0 and 000008/0, share a range: a run in the order of its data needs as much memory
    after a million episodes as after a hundred. Ids without a number are kept as they are. One thread may add while
    others ask.
    """

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ranges: dict[_Family, list[int]] = {}  # starts and ends, alternating, sorted: [0, 5, 8, 9] is 0..4 and 8
        self._others: set[str] = set()
        self._num = 0
        for episode_id in ids:
            self.add(episode_id)

    def add(self, episode_id: str) -> None:
        """Have it in the set."""
        split = _split(episode_id)
        if split is None:
            self._num += episode_id not in self._others
            self._others.add(episode_id)
            return
        family, number = split
        edges = self._ranges.setdefault(family, [])
        at = bisect_right(edges, number)
        if at % 2:  # inside a range
            return
        self._num += 1
        joins_left, joins_right = at > 0 and edges[at - 1] == number, at < len(edges) and edges[at] == number + 1
        edges[at - joins_left : at + joins_right] = ([] if joins_left else [number]) + (
            [] if joins_right else [number + 1]
        )

    def __contains__(self, episode_id: object) -> bool:
        if not isinstance(episode_id, str):
            return False
        split = _split(episode_id)
        if split is None:
            return episode_id in self._others
        return bisect_right(self._ranges.get(split[0], []), split[1]) % 2 == 1

    def __iter__(self) -> Iterator[str]:
        for (before, width, after), edges in self._ranges.items():
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                yield from (f"{before}{number:0{width}}{after}" for number in range(start, end))
        yield from self._others

    def __len__(self) -> int:
        return self._num


def _split(episode_id: str) -> tuple[_Family, int] | None:
    match = _COUNTED.fullmatch(episode_id)
    if match is None or len(match[2]) > 18:
        return None
    before, digits, after = match.groups(default="")
    return (before, len(digits), after), int(digits)
