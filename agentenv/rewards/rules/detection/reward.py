"""Compare the boxes in an answer with true ones, matched optimally and in any order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from agentenv.core.arguments import is_finite
from agentenv.errors import ConfigError
from agentenv.rewards.rules.detection.matching import AVERAGED, COCO, LOWEST, BoxMatcher
from agentenv.rewards.rules.detection.rows import (
    METRICS,
    Boxes,
    Rules,
    answer_block,
    check_rules,
    normalize_boxes,
    read_boxes,
    row_of,
    rules_of,
    stage_threshold,
    truth_of,
)
from agentenv.rewards.rules.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

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
