"""Compare the boxes in an answer with true ones, matched optimally and in any order.

Boxes are JSON or Python, fenced or cut off in the middle, and are read in time linear in the text. Rows of a detection
set have the true boxes, and the rules of ROLL's; they are never changed. A `BoxMatcher` has the boxes of one answer,
per image; counts are pooled over images as in COCO.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from agentenv._util.brief import brief
from agentenv._util.lenient_json import read_partial_list
from agentenv.core.arguments import is_finite
from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.rewards.rules.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

MAX_CHARS = 200_000
"""Longer answers are not read."""
_MAX_COORDINATE = 1e9
_OPEN, _CLOSE = "<answer>", "</answer>"
_FENCE = re.compile(r"\s*(?:`{3,}\w{0,20})?\s*")
METRICS = ("iou_max_label_first", "iou_max_iou_first", "map", "map50", "map75")
_KNOWN_RATIOS = (*METRICS, "iou_completeness")
MAX_TRUTH = 200
"""Maximum number of true boxes of a row: matching is cubic in the number of overlapping ones."""
NORMALIZED = 1000.0
"""The side of an image in normalized coordinates."""
_STAGES = ((0.1, 0.85), (0.25, 0.95))
_LAST_STAGE = 0.99


class Box(NamedTuple):
    """A labeled box; sorts by value."""

    label: str
    """In lower case, with single spaces."""
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes that an answer names."""

    images: tuple[tuple[Box, ...], ...]
    """Per image, sorted, without duplicates. An answer that is not a list of lists describes one image."""
    num_invalid: int = 0
    """Entries that are not boxes."""
    complete: bool = True
    """True if the list is closed and has nothing but a code fence around it."""

    def __len__(self) -> int:
        """Return the number of boxes over all images."""
        return sum(map(len, self.images))


def answer_block(text: str) -> tuple[str | None, bool]:
    """Return the content of the last `<answer>` block, None without one, and True if the block is well formed.

    A well-formed block is the only one, and each of its tags stands on its own line. The last block may lack its end.
    """
    start = text.rfind(_OPEN)
    if start < 0:
        return None, False
    block, closed, _ = text[start + len(_OPEN) :].partition(_CLOSE)
    alone = text.count(_OPEN) == text.count(_CLOSE) == 1 and bool(closed)
    lines = (
        text[:start].rstrip(" \t")[-1:] in ("", "\n") and block.lstrip(" \t")[:1] == "\n" == block.rstrip(" \t")[-1:]
    )
    return block, alone and lines


def read_boxes(text: str) -> Boxes | None:
    """Return the boxes up to where the list ends, is cut off or is not a list; None if the text has no list."""
    start = text.find("[")
    if start < 0 or len(text) > MAX_CHARS:
        return None
    entries, end = read_partial_list(text, start)
    complete = end is not None and all(_FENCE.fullmatch(part) for part in (text[:start], text[end:]))
    return boxes_of(entries, complete=complete)


def boxes_of(entries: Sequence[Any], *, complete: bool = True) -> Boxes:
    """Return the boxes among entries `{"bbox_2d": [x1, y1, x2, y2], "label": …}`, or among lists of these per image."""
    nested = any(isinstance(entry, list | tuple) for entry in entries)
    rows = [entry if isinstance(entry, list | tuple) else [entry] for entry in entries] if nested else [entries]
    found = [[_box(entry) for entry in row] for row in rows]
    images = tuple(tuple(sorted({box for box in row if box is not None})) for row in found)
    return Boxes(images, sum(box is None for row in found for box in row), complete)


def _box(entry: Any) -> Box | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("label"), str):
        return None
    corners = entry.get("bbox_2d")
    if not isinstance(corners, list | tuple) or len(corners) != 4:
        return None
    for corner in corners:
        if not isinstance(corner, int | float) or isinstance(corner, bool) or not abs(corner) <= _MAX_COORDINATE:
            return None
    x1, y1, x2, y2 = map(float, corners)
    return Box(" ".join(entry["label"].split()).lower(), x1, y1, x2, y2) if x1 <= x2 and y1 <= y2 else None


@dataclass(frozen=True, slots=True)
class Rules:
    """Weights and units for grading boxes."""

    ratios: Mapping[str, float]
    """Weights of `METRICS`, and the part of completeness in the first two (`iou_completeness`), each 0..1."""
    format_ratio: float
    accuracy_ratio: float
    in_pixels: bool
    """True if predicted boxes are in pixels, and true ones in thousandths of the image."""


def check_rules(rules: Rules, where: str, error: type[AgentEnvError]) -> Rules:
    """Return the rules.

    Raises:
        AgentEnvError: of the class `error`, if they are invalid.
    """
    ratios = rules.ratios
    if not isinstance(ratios, Mapping) or not ratios.keys() <= set(_KNOWN_RATIOS):
        raise error(f"{where}: expected ratios of {', '.join(_KNOWN_RATIOS)}, got {brief(ratios)}.")
    if not all(is_finite(value) and 0 <= value <= 1 for value in ratios.values()):
        raise error(f"{where}: expected ratios from 0 to 1, got {brief(dict(ratios))}.")
    if not any(ratios.get(name) for name in METRICS):
        raise error(f"{where}: expected a ratio above 0 of {', '.join(METRICS)}, got {brief(dict(ratios))}. Set one.")
    parts = (rules.format_ratio, rules.accuracy_ratio)
    if not all(is_finite(part) and part >= 0 for part in parts) or sum(parts) <= 0:
        raise error(f"{where}: expected format_ratio and accuracy_ratio >= 0, not both 0, got {brief(parts)}.")
    if not isinstance(rules.in_pixels, bool):
        raise error(f"{where}: expected true or false for pixels, got {brief(rules.in_pixels, 80)}.")
    return rules


def row_of(label: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ROLL's columns of a row: `ground_truth`, ratios and `verifier_parm`, from label or `reward_model`.

    Raises:
        DataError: the ground truth is missing.
    """
    column = _json("reward_model", metadata.get("reward_model"))
    if isinstance(label, str) and label.lstrip()[:1] == "{":
        label = _json("label", label)
    own = label if isinstance(label, Mapping) else {} if _is_empty(label) else {"ground_truth": label}
    row = {**column, **own}
    if _is_empty(row.get("ground_truth")):
        raise _row_error("ground_truth", "boxes in the label or in reward_model", row.get("ground_truth"))
    return row


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def rules_of(row: Mapping[str, Any], default: Rules) -> Rules:
    """Return the rules of a row, with the default for missing ones.

    Raises:
        DataError: they are invalid.
    """
    parameters = _json("verifier_parm", row.get("verifier_parm"))
    ratios = _json("det_reward_ratio", parameters.get("det_reward_ratio"))
    own: dict[str, Any] = {
        "ratios": {name: value for name, value in ratios.items() if value is not None} or None,
        "format_ratio": row.get("format_ratio"),
        "accuracy_ratio": row.get("accuracy_ratio"),
        "in_pixels": parameters.get("det_verifier_normalized"),
    }
    rules = replace(default, **{name: value for name, value in own.items() if value is not None})
    return check_rules(rules, "DetectionReward: a row", DataError)


def truth_of(row: Mapping[str, Any]) -> Boxes:
    """Return the true boxes, from a list of them or of lists per image, or its text, also in `<answer>` tags.

    Raises:
        DataError: it has another form, an invalid box, or too many boxes.
    """
    truth = row["ground_truth"]
    if isinstance(truth, str):
        boxes = read_boxes(answer_block(truth)[0] or truth)
    else:
        boxes = boxes_of(truth) if isinstance(truth, list | tuple) else None
    if boxes is None or boxes.num_invalid or not boxes.complete:
        form = "a list of {'bbox_2d': [x1, y1, x2, y2], 'label': …} with x1 <= x2 and y1 <= y2"
        raise _row_error("ground_truth", form, truth)
    if len(boxes) > MAX_TRUTH:
        raise _row_error("ground_truth", f"at most {MAX_TRUTH} boxes", len(boxes))
    return boxes


def normalize_boxes(boxes: Boxes, metadata: Mapping[str, Any]) -> Boxes:
    """Convert boxes in pixels to thousandths of their images, rounded down as true ones are.

    Raises:
        DataError: the row does not have the sizes of its images.
    """
    given = metadata.get("image_size")  # a pair, or a list of pairs
    sizes: Any = given if isinstance(given, list | tuple) and given and isinstance(given[0], list | tuple) else [given]
    for size in sizes:
        if not isinstance(size, list | tuple) or len(size) != 2 or not all(is_finite(x) and x >= 1 for x in size):
            raise _row_error("image_size", "[width, height] in pixels, as boxes in pixels need", given)
    images = []
    for index, image in enumerate(boxes.images):
        scaled = set()
        for label, *corners in image:
            sides = sizes[min(index, len(sizes) - 1)] * 2
            x1, y1, x2, y2 = (float(int(x / side * NORMALIZED)) for x, side in zip(corners, sides, strict=True))
            scaled.add(Box(label, x1, y1, x2, y2))
        images.append(tuple(sorted(scaled)))
    return replace(boxes, images=tuple(images))


def stage_threshold(metadata: Mapping[str, Any]) -> float:
    """Return a threshold that rises in training: .85, .95 after a tenth of it and .99 after a quarter.

    It depends on `global_step` and `max_steps`; without `max_steps` it is that of the start.

    Raises:
        DataError: they are not numbers.
    """
    step, steps = (metadata.get(name) or 0 for name in ("global_step", "max_steps"))
    if not is_finite(step) or not is_finite(steps):
        raise _row_error("global_step and max_steps", "numbers", (step, steps))
    done = step / steps if steps > 0 else 0.0
    return next((threshold for end, threshold in _STAGES if done <= end), _LAST_STAGE)


def _json(name: str, value: Any) -> Mapping[str, Any]:
    """Return a column that is an object, or JSON of one; an empty column is an empty object."""
    if _is_empty(value):
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise _row_error(name, "an object or its JSON", value) from error
    if not isinstance(found, Mapping):
        raise _row_error(name, "an object or its JSON", value)
    return found


def _row_error(name: str, expected: str, got: Any) -> DataError:
    return DataError(f"DetectionReward: {name}: expected {expected}, got {brief(got)}. Fix or remove the row.")


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
    at: dict[tuple[int, int, bool], list[Pair]] = {}  # by box: its pairs
    for image, i, j in weights:
        at.setdefault((image, i, True), []).append((image, i, j))
        at.setdefault((image, j, False), []).append((image, i, j))
    chosen: list[Pair] = []
    seen: set[Pair] = set()
    for first in weights:
        if first in seen:
            continue
        seen.add(first)
        group = [first]  # all pairs that are connected with it by shared boxes
        for image, i, j in group:  # which grows
            new = [pair for pair in (*at[image, i, True], *at[image, j, False]) if pair not in seen]
            group += dict.fromkeys(new)
            seen.update(new)
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


def heaviest(table: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the assignment of rows to columns with the largest sum, by the Hungarian method.

    It has min(rows, columns) cells. Takes O(min² · max) time: rows are added one by one along the cheapest path.
    """
    if len(table) > len(table[0]):
        return sorted((i, j) for j, i in heaviest([list(column) for column in zip(*table, strict=True)]))
    start = len(table[0])  # a column for the row that is being placed
    row_at = [-1] * (start + 1)
    of_row, of_column = [0.0] * len(table), [0.0] * (start + 1)  # potentials: no cell has a negative cost
    for placed in range(len(table)):
        row_at[start] = placed
        # The cheapest free column, and for each column its predecessor on the path to it; cells on it have cost 0.
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
        while column != start:
            row_at[column] = row_at[came_from[column]]
            column = came_from[column]
    return sorted((i, j) for j, i in enumerate(row_at[:start]) if i >= 0)


COUNT_PENALTY = 0.6
"""Factor of the accuracy for each box without a partner."""
MAX_SURPLUS = 100
"""With more surplus boxes the accuracy is 0; the penalty alone makes it less than 1e-22."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="detection")
"""It grades answers, and starts with the first; more threads would take the interpreter from the event loop."""
_FEEDBACK = "Write the boxes as one JSON list between <answer> and </answer>, each tag on a separate line."
RATIOS = {"iou_max_label_first": 1.0, "iou_completeness": 0.3}
_COMPONENTS = (
    "format", "accuracy", "iou_max_label_first", "iou_max_iou_first", "mean_iou", "completeness", "map", "map50",
    "map75", "count_penalty", "num_boxes", "num_invalid",
)  # fmt: skip


class DetectionReward:
    """The quality of the boxes in the `<answer>` block of a response, behind its thinking.

    An answer is a list of `{"bbox_2d": [x1, y1, x2, y2], "label": …}`, as JSON or Python, or a list of such lists, one
    per image. A list that is cut off counts up to its last complete box; invalid and repeated boxes are left out.
    Labels are compared in lower case. The true boxes are the label, in any of these forms, or ROLL's `ground_truth` in
    the label or in `reward_model`, whose ratios and `verifier_parm` override the options.

    - accuracy = Σ ratio · metric / Σ ratio · 0.6 to the number of boxes without a partner, on the side that has more.
      ROLL's exponent is the difference of the counts, which rewards wrong boxes if some are missing; `by_count` selects
      it. Both are equal if each box of the smaller side has a partner.
    - `iou_max_label_first`, `iou_max_iou_first`: (1 - c) · mean IoU + c · completeness with c = `iou_completeness`,
      over pairs of equal labels, or over pairs by position alone, of which those of different labels do not count.
    - `map`, `map50`, `map75`: AP of 101 points at .50:.95, .50 and .75, with equal confidence of all boxes.
    - reward = (accuracy_ratio · accuracy + format_ratio · format) / (accuracy_ratio + format_ratio).
    - format: 1 if there is one block, with its tags on separate lines, and a complete list of valid boxes in it.

    The threshold of IoU for the first two is a number; `average`, over .50:.95 and .99; or `dynamic`: .85, then .95 and
    .99 by `global_step` and `max_steps` in the metadata. Score: the accuracy. A row without true boxes (`[]`) requires
    an empty list. An additional wrong box, which overlaps no true box by half, never raises the reward.
    Source: github.com/alibaba/ROLL, roll/pipeline/rlvr/rewards/detection_reward_worker.py.
    """

    bounds: tuple[float, float] = (0.0, 1.0)

    def __init__(
        self,
        *,
        ratios: Mapping[str, float] | None = None,
        threshold: float | Literal["average", "dynamic"] = "average",
        format_ratio: float = 0.1,
        accuracy_ratio: float = 1.0,
        in_pixels: bool = False,
        by_count: bool = False,
    ) -> None:
        """Set the rules for rows without rules.

        Args:
            ratios: weights of the metrics, 0..1, and `iou_completeness`; None: `RATIOS`.
            threshold: threshold of IoU.
            format_ratio: weight of the format.
            accuracy_ratio: weight of the accuracy.
            in_pixels: True if predicted boxes are in pixels and true ones in thousandths of the image; the metadata
                must have `image_size`, [width, height] or a list of these.
            by_count: True to penalize as ROLL does.

        Raises:
            ConfigError: an argument is invalid.
        """
        rules = Rules(dict(RATIOS if ratios is None else ratios), format_ratio, accuracy_ratio, in_pixels)
        self._rules = check_rules(rules, "DetectionReward", ConfigError)
        in_range = is_finite(threshold) and LOWEST <= float(threshold) <= 1.0
        if threshold not in ("average", "dynamic") and not in_range:
            raise ConfigError(
                f"DetectionReward.threshold: expected average, dynamic or {LOWEST}..1, got {threshold!r}."
            )
        self._threshold = threshold
        self._by_count = by_count

    async def grade(self, response: Response) -> RewardResult:
        """Return the result for the boxes of a response.

        Raises:
            DataError: the row has no true boxes, or invalid rules.
        """
        # This takes about a millisecond, and there may be hundreds of concurrent answers: do not block the event loop.
        return await asyncio.get_running_loop().run_in_executor(_THREAD, self._grade, response)

    def _grade(self, response: Response) -> RewardResult:
        row = row_of(response.label, response.metadata)
        rules, truth = rules_of(row, self._rules), truth_of(row)
        if self._threshold == "average":
            thresholds = AVERAGED
        elif self._threshold == "dynamic":
            thresholds = (stage_threshold(response.metadata),)
        else:
            thresholds = (float(self._threshold),)
        text = final_text(response.text, response.prompt)
        block, well_formed = (None, False) if text is None else answer_block(text)
        boxes = None if block is None else read_boxes(block)
        if boxes is None or (not len(boxes) and (boxes.num_invalid or not boxes.complete)):
            status = Status.NO_ANSWER if block is None else Status.PARSE_ERROR
            nothing = dict.fromkeys(_COMPONENTS, 0.0) | {"num_invalid": float(boxes.num_invalid if boxes else 0)}
            return RewardResult(0.0, 0.0, status, nothing, block and block.strip(), _FEEDBACK)
        if rules.in_pixels:
            boxes = normalize_boxes(boxes, response.metadata)
        form = float(well_formed and boxes.complete and not boxes.num_invalid)
        parts = {"format": form, "num_boxes": float(len(boxes)), "num_invalid": float(boxes.num_invalid)}
        parts |= self._measure(boxes, truth, rules=rules, thresholds=thresholds)
        total = rules.accuracy_ratio + rules.format_ratio
        reward = (rules.accuracy_ratio * parts["accuracy"] + rules.format_ratio * form) / total
        components = {name: parts[name] for name in _COMPONENTS}
        return RewardResult(reward, parts["accuracy"], Status.OK, components, (block or "").strip(), "")

    def _measure(self, boxes: Boxes, truth: Boxes, *, rules: Rules, thresholds: tuple[float, ...]) -> dict[str, float]:
        if len(boxes) > len(truth) + MAX_SURPLUS:
            return dict.fromkeys(set(_COMPONENTS) - {"format", "num_boxes", "num_invalid"}, 0.0)
        matcher = BoxMatcher(boxes.images, truth.images)
        completeness = rules.ratios.get("iou_completeness", 0.0)
        parts = {}
        for name, labels_first in (("iou_max_iou_first", False), ("iou_max_label_first", True)):
            qualities = [matcher.quality(threshold, labels_first=labels_first) for threshold in thresholds]
            parts["mean_iou"] = math.fsum(each.mean_iou for each in qualities) / len(qualities)
            parts["completeness"] = math.fsum(each.completeness for each in qualities) / len(qualities)
            parts[name] = (1.0 - completeness) * parts["mean_iou"] + completeness * parts["completeness"]
        precisions = [matcher.average_precision(threshold) for threshold in COCO]
        parts |= {"map": math.fsum(precisions) / len(COCO), "map50": precisions[0], "map75": precisions[5]}
        wrong = matcher.count_difference() if self._by_count else matcher.num_unmatched()
        parts["count_penalty"] = COUNT_PENALTY**wrong
        weights = {name: rules.ratios.get(name, 0.0) for name in METRICS}
        quality = math.fsum(weights[name] * parts[name] for name in METRICS) / math.fsum(weights.values())
        return {**parts, "accuracy": min(1.0, quality * parts["count_penalty"])}
