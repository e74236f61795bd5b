"""Match predicted boxes with true ones optimally, and measure IoU, completeness and AP.

A `BoxMatcher` has the boxes of one answer, per image; counts are pooled over images as in COCO.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from agentenv.rewards.rules.detection.rows import Box

COCO = tuple(0.5 + 0.05 * step for step in range(10))
"""The thresholds of COCO's AP, .50:.05:.95."""
AVERAGED = (*COCO, 0.99)
LOWEST = COCO[0]
"""Boxes that overlap less are never a pair."""
_ROUNDING = 1e-9
_SAME_LABEL = 1e-6
"""Added weight of a pair with equal labels, for pairs of equal overlap."""
Pair = tuple[int, int, int]
"""Image, predicted box, true box."""


class MatchQuality(NamedTuple):
    """Figures at one threshold; all three are 1 if there are neither true nor predicted boxes."""

    mean_iou: float
    """Sum of the IoU of pairs with equal labels, divided by the number of true boxes."""
    precision: float
    """Share of the predicted boxes that have a partner of their label."""
    recall: float

    @property
    def completeness(self) -> float:
        """1 - (misses + false alarms) / 2, both as shares."""
        return (self.precision + self.recall) / 2.0


class BoxMatcher:
    """Predicted and true boxes, per image; images that one side lacks have no partners."""

    def __init__(self, predicted: Sequence[Sequence[Box]], truth: Sequence[Sequence[Box]]) -> None:
        rows = max(len(predicted), len(truth))
        self.predicted = [*predicted, *[()] * (rows - len(predicted))]
        self.truth = [*truth, *[()] * (rows - len(truth))]
        self.num_predicted = sum(map(len, predicted))
        self.num_truth = sum(map(len, truth))
        self._matched: dict[tuple[bool, frozenset[Pair]], list[Pair]] = {}

    def quality(self, threshold: float, *, labels_first: bool) -> MatchQuality:
        """Return the figures at a threshold of IoU.

        The matching has the largest number of pairs, and among those the highest sum of IoU. With `labels_first` only
        boxes with equal labels are paired; else position alone decides, and pairs of different labels do not count.
        """
        if not self.num_truth:
            return MatchQuality(*[float(not self.num_predicted)] * 3)
        pairs = self._pairs_at(threshold, labels_first=labels_first)
        good = [self._ious[pair] for pair in pairs if self._same(pair)]
        precision = len(good) / self.num_predicted if self.num_predicted else 0.0
        return MatchQuality(math.fsum(good) / self.num_truth, precision, len(good) / self.num_truth)

    def average_precision(self, threshold: float) -> float:
        """Return COCO's AP of 101 points at one threshold, over the labels of the true boxes.

        All boxes have equal confidence, so precision has a single point, at the final recall, and their order does not
        matter.
        """
        truth = Counter(box.label for boxes in self.truth for box in boxes)
        predicted = Counter(box.label for boxes in self.predicted for box in boxes)
        if not truth:
            return float(not predicted)
        found = Counter(self._label(pair) for pair in self._pairs_at(threshold, labels_first=True))
        areas = [
            found[label] / predicted[label] * (100 * found[label] // count + 1) / 101.0 if found[label] else 0.0
            for label, count in truth.items()
        ]
        return math.fsum(areas) / len(areas)

    def num_unmatched(self) -> int:
        """Return the number of boxes without a partner of their label, on the side with more, over all images."""
        matched = Counter(image for image, _, _ in self._pairs_at(LOWEST, labels_first=True))
        return sum(
            max(len(ours), len(theirs)) - matched[image]
            for image, (ours, theirs) in enumerate(zip(self.predicted, self.truth, strict=True))
        )

    def count_difference(self) -> int:
        """Return the number of boxes that are too many or too few, over all images."""
        return sum(abs(len(ours) - len(theirs)) for ours, theirs in zip(self.predicted, self.truth, strict=True))

    @cached_property
    def _ious(self) -> dict[Pair, float]:
        """Return the IoU of all pairs that overlap enough, with any labels."""
        return {
            (image, i, j): overlap
            for image, (ours, theirs) in enumerate(zip(self.predicted, self.truth, strict=True))
            for i, box in enumerate(ours)
            for j, other in enumerate(theirs)
            if (overlap := iou(box, other)) >= LOWEST - _ROUNDING
        }

    def _pairs_at(self, threshold: float, *, labels_first: bool) -> list[Pair]:
        near = {
            pair: overlap + _SAME_LABEL * self._same(pair)
            for pair, overlap in self._ious.items()
            if overlap >= threshold - _ROUNDING and (not labels_first or self._same(pair))
        }
        key = (labels_first, frozenset(near))  # the same at most thresholds
        if key not in self._matched:
            self._matched[key] = best_pairs(near)
        return self._matched[key]

    def _label(self, pair: Pair) -> str:
        return self.truth[pair[0]][pair[2]].label

    def _same(self, pair: Pair) -> bool:
        return self.predicted[pair[0]][pair[1]].label == self._label(pair)


def iou(a: Box, b: Box) -> float:
    """Return intersection over union; 1 for equal boxes, also without an area."""
    width, height = min(a.x2, b.x2) - max(a.x1, b.x1), min(a.y2, b.y2) - max(a.y1, b.y1)
    if a[1:] == b[1:]:
        return 1.0
    if width <= 0.0 or height <= 0.0:
        return 0.0
    common = width * height
    both = (a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1) - common
    return min(1.0, common / both) if common > 0.0 else 0.0  # it may be too small for a float


def best_pairs(weights: Mapping[Pair, float]) -> list[Pair]:
    """Return the largest matching, and the heaviest among those; weights are from 0 to 2."""
    chosen: list[Pair] = []
    for group in _connected(weights):
        if len(group) == 1:
            chosen += group
            continue
        rows = sorted({(image, i) for image, i, _ in group})
        columns = sorted({j for _, _, j in group})
        more = 2.0 * len(group) + 1.0  # than all weights together: one more pair always wins
        row_of = {row: number for number, row in enumerate(rows)}
        column_of = {column: number for number, column in enumerate(columns)}
        table = [[0.0] * len(columns) for _ in rows]
        for pair in group:
            table[row_of[pair[:2]]][column_of[pair[2]]] = more + weights[pair]
        chosen += [(*rows[i], columns[j]) for i, j in heaviest(table) if table[i][j] > 0.0]
    return sorted(chosen)


def _connected(pairs: Mapping[Pair, float]) -> Iterator[list[Pair]]:
    """Yield groups of pairs that are connected by shared boxes."""
    at: dict[tuple[int, int, bool], list[Pair]] = {}
    for image, i, j in pairs:
        at.setdefault((image, i, True), []).append((image, i, j))
        at.setdefault((image, j, False), []).append((image, i, j))
    seen: set[Pair] = set()
    for first in pairs:
        if first in seen:
            continue
        seen.add(first)
        group = [first]
        for image, i, j in group:  # which grows
            new = [pair for pair in (*at[image, i, True], *at[image, j, False]) if pair not in seen]
            group += dict.fromkeys(new)
            seen.update(new)
        yield group


def heaviest(table: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the assignment of rows to columns with the largest sum, by the Hungarian method.

    It has min(rows, columns) cells. Takes O(min² · max) time: rows are added one by one along the cheapest path.
    """
    if len(table) > len(table[0]):
        return sorted((i, j) for j, i in heaviest([list(column) for column in zip(*table, strict=True)]))
    start = len(table[0])  # a column for the row that is being placed
    row_at = [-1] * (start + 1)
    of_row, of_column = [0.0] * len(table), [0.0] * (start + 1)
    for row in range(len(table)):
        row_at[start] = row
        column, came_from = _cheapest_path(table, row_at, of_row, of_column)
        while column != start:
            row_at[column] = row_at[came_from[column]]
            column = came_from[column]
    return sorted((i, j) for j, i in enumerate(row_at[:start]) if i >= 0)


def _cheapest_path(
    table: Sequence[Sequence[float]], row_at: Sequence[int], of_row: list[float], of_column: list[float]
) -> tuple[int, list[int]]:
    """Return the cheapest free column for the last row, and for each column its predecessor on the path.

    It updates the potentials so that no cell has a negative cost, and cells on the path have cost 0.
    """
    start = len(of_column) - 1
    least, came_from = [math.inf] * start, [start] * start
    ahead, behind = list(range(start)), [start]
    column = start
    while row_at[column] >= 0:
        row = row_at[column]
        for j in ahead:
            cost = -table[row][j] - of_row[row] - of_column[j]
            if cost < least[j]:
                least[j], came_from[j] = cost, column
        nearest = min(ahead, key=least.__getitem__)
        step = least[nearest]
        for j in behind:
            of_row[row_at[j]] += step
            of_column[j] -= step
        for j in ahead:
            least[j] -= step
        ahead.remove(nearest)
        behind.append(nearest)
        column = nearest
    return column, came_from
