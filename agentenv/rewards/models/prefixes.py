"""Sequences that begin alike, as all answers to one prompt do: what they share need be computed once.

Example:
    >>> families([[7] * 40 + [1], [5, 6], [7] * 40 + [2, 3]], least=16)
    [Family(num_shared=40, indices=(0, 2))]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentenv.rewards.models.batching import TOKENS_OF_A_CALL, batches

LEAST_SHARED = 16
"""Tokens: less is not worth a call of its own; templates begin alike by as many."""
LEAST_SAVED = 2 * TOKENS_OF_A_CALL
"""Tokens that a batch must save: sharing takes two calls or three where there was one."""


@dataclass(frozen=True, slots=True)
class Family:
    """Sequences that begin alike."""

    num_shared: int
    """Tokens that all of them begin with; each has at least one more."""
    indices: tuple[int, ...]
    """At least two, ascending in what follows."""

    @property
    def num_saved(self) -> int:
        """Tokens that need not be computed."""
        return self.num_shared * (len(self.indices) - 1)


def families(sequences: Sequence[list[int]], *, least: int = LEAST_SHARED) -> list[Family]:
    """The sequences that begin alike by at least `least` tokens, in families; one that is like no other is in none.

    What everybody begins with, as a system prompt, joins no families: a neighbour that shares less than half of what
    the next one does is a stranger.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    alike = [_num_alike(sequences[a], sequences[b]) for a, b in pairwise(order)]
    found, start = [], 0
    for end in range(1, len(order) + 1):
        if end < len(order) and _are_kin(alike, end - 1, least):
            continue
        if end - start > 1:
            found.append(Family(min(alike[start : end - 1]), tuple(order[start:end])))
        start = end
    return found


def _are_kin(alike: Sequence[int], place: int, least: int) -> bool:
    around = max(alike[max(place - 1, 0) : place + 2])
    return alike[place] >= least and 2 * alike[place] >= around


def _num_alike(left: list[int], right: list[int]) -> int:
    """How many tokens two sequences begin with alike; less than either has."""
    low, high = 0, min(len(left), len(right)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def family_batches(sequences: Sequence[list[int]], max_batch: int, max_tokens: int) -> list[list[int]]:
    """As `batching.batches`, but with families whole in their batches, as far as they fit, before all others.

    Tokens are those that are computed: what a family shares once, and padded to what the batch's first one shares.
    Families that save too little to be computed apart are among the others.
    """
    parts = [part for family in families(sequences) for part in _parts(family, sequences, max_batch, max_tokens)]
    packs: list[list[Family]] = []
    for part in sorted(parts, key=lambda each: -each.num_shared):
        if not packs or not _joins(part, packs[-1], sequences, max_batch, max_tokens):
            packs.append([])
        packs[-1].append(part)
    worth = [pack for pack in packs if sum(part.num_saved for part in pack) >= LEAST_SAVED]
    found = [[index for part in pack for index in part.indices] for pack in worth]
    kin = {index for batch in found for index in batch}
    rest = [index for index in range(len(sequences)) if index not in kin]
    return found + [
        [rest[place] for place in batch]
        for batch in batches([len(sequences[index]) for index in rest], max_batch, max_tokens)
    ]


def _parts(family: Family, sequences: Sequence[list[int]], max_batch: int, max_tokens: int) -> list[Family]:
    """A family as it fits into batches; who is left alone is in none."""
    parts: list[list[int]] = [[]]
    room = max_tokens - family.num_shared
    for index in family.indices:
        own = len(sequences[index]) - family.num_shared
        if parts[-1] and (len(parts[-1]) == max_batch or own > room):
            parts.append([])
            room = max_tokens - family.num_shared
        parts[-1].append(index)
        room -= own
    return [Family(family.num_shared, tuple(part)) for part in parts if len(part) > 1]


def _joins(
    part: Family, pack: Sequence[Family], sequences: Sequence[list[int]], max_batch: int, max_tokens: int
) -> bool:
    """Whether a family finds room beside those that share more, and saves more than it is padded by."""
    longest, both = pack[0].num_shared, [*pack, part]
    own = sum(len(sequences[index]) - each.num_shared for each in both for index in each.indices)
    return (
        sum(len(each.indices) for each in both) <= max_batch
        and len(both) * longest + own <= max_tokens
        and longest - part.num_shared <= part.num_saved
    )
