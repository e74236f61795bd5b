"""`DetectionReward`: boxes in an answer against true ones, paired as well as can be, whatever order they come in."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal

from agentenv.errors import ConfigError
from agentenv.rewards._detection_match import AVERAGED, COCO, LOWEST, Scene
from agentenv.rewards._detection_rows import (
    METRICS,
    Rules,
    checked_rules,
    normalised,
    row_of,
    rules_of,
    stage_threshold,
    truth_of,
)
from agentenv.rewards._detection_text import Boxes, answer_block, read_boxes
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status, is_finite

COUNT_PENALTY = 0.6
"""Factor of the accuracy for each box that has no partner."""
MAX_SURPLUS = 100
"""With more boxes too many the accuracy is 0; the penalty alone makes it less than 1e-22."""
RATIOS = {"iou_max_label_first": 1.0, "iou_completeness": 0.3}
_COMPONENTS = (
    "format", "accuracy", "iou_max_label_first", "iou_max_iou_first", "mean_iou", "completeness", "map", "map50",
    "map75", "count_penalty", "num_boxes", "num_invalid",
)  # fmt: skip


class DetectionReward:
    """Judges the boxes in the `<answer>` block of a response, behind its thinking.

    An answer is a list of `{"bbox_2d": [x1, y1, x2, y2], "label": …}`, as JSON or Python, or a list of such lists, one
    per image. A list that is cut off counts up to its last complete box; what is no box is left out, and so are boxes
    that are said again. Labels are compared in lower case. The true boxes are the label, in any of these forms, or
    ROLL's `ground_truth` in the label or in `reward_model`, whose ratios and `verifier_parm` go before the options.

    - accuracy = Σ ratio · metric / Σ ratio · 0.6 to the number of boxes without a partner, on the side that has more.
      ROLL's exponent is the difference of the counts, which pays for wrong boxes where some are missing; `by_count` is
      that. It is the same where each box of the side that has fewer finds its partner.
    - `iou_max_label_first`, `iou_max_iou_first`: (1 - c) · mean IoU + c · completeness with c = `iou_completeness`,
      over pairs of one label, or over pairs by position alone, of which those of two labels do not count.
    - `map`, `map50`, `map75`: AP of 101 points at .50:.95, .50 and .75, as if all boxes had one confidence.
    - reward = (accuracy_ratio · accuracy + format_ratio · format) / (accuracy_ratio + format_ratio).
    - format: 1 where there is one block, its tags on lines of their own, with a complete list of nothing but boxes.

    The threshold of IoU for the first two is one number; `average`, which is over .50:.95 and .99; or `dynamic`:
    .85, then .95 and .99 by `global_step` and `max_steps` among the metadata. Score: the accuracy. A row without true
    boxes (`[]`) wants an empty list. A wrong box more, one that overlaps no true box by half, never raises the reward.
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
        """Set the rules for rows that bring none.

        Args:
            ratios: weights of the metrics, 0..1, and `iou_completeness`; `RATIOS` when None.
            threshold: of IoU.
            format_ratio: weight of the format.
            accuracy_ratio: weight of the accuracy.
            in_pixels: whether predicted boxes are in pixels and true ones in thousandths of the image; the metadata
                must have `image_size`, [width, height] or a list of these.
            by_count: penalise as ROLL does.

        Raises:
            ConfigError: one of them is none that there is.
        """
        rules = Rules(dict(RATIOS if ratios is None else ratios), format_ratio, accuracy_ratio, in_pixels)
        self._rules = checked_rules(rules, "DetectionReward", ConfigError)
        in_range = is_finite(threshold) and LOWEST <= float(threshold) <= 1.0
        if threshold not in ("average", "dynamic") and not in_range:
            raise ConfigError(
                f"DetectionReward.threshold: expected average, dynamic or {LOWEST}..1, got {threshold!r}. Change it."
            )
        self._threshold, self._by_count = threshold, by_count

    async def grade(self, response: Response) -> RewardResult:
        """What the boxes of a response are worth.

        Raises:
            DataError: the row has no true boxes, or rules that cannot be followed.
        """
        # About a millisecond, and there may be hundreds of answers at once: the event loop is not to wait for them all.
        return await asyncio.get_running_loop().run_in_executor(_one_thread(), self._graded, response)

    def _graded(self, response: Response) -> RewardResult:
        row = row_of(response.label, response.metadata)
        rules, truth = rules_of(row, self._rules), truth_of(row)
        return self._judged(response, truth, rules=rules, thresholds=self._thresholds(response.metadata))

    def _thresholds(self, metadata: Mapping[str, Any]) -> tuple[float, ...]:
        if self._threshold == "average":
            return AVERAGED
        return (stage_threshold(metadata) if self._threshold == "dynamic" else float(self._threshold),)

    def _judged(self, response: Response, truth: Boxes, *, rules: Rules, thresholds: tuple[float, ...]) -> RewardResult:
        text = final_text(response.text)
        block, well_formed = (None, False) if text is None else answer_block(text)
        boxes = None if block is None else read_boxes(block)
        if boxes is None or (not len(boxes) and (boxes.num_invalid or not boxes.whole)):
            status = Status.NO_ANSWER if block is None else Status.PARSE_ERROR
            nothing = dict.fromkeys(_COMPONENTS, 0.0) | {"num_invalid": float(boxes.num_invalid if boxes else 0)}
            return RewardResult(0.0, 0.0, status, nothing, block and block.strip(), _FEEDBACK)
        if rules.in_pixels:
            boxes = normalised(boxes, response.metadata)
        form = float(well_formed and boxes.whole and not boxes.num_invalid)
        parts = {"format": form, "num_boxes": float(len(boxes)), "num_invalid": float(boxes.num_invalid)}
        parts |= self._measured(boxes, truth, rules=rules, thresholds=thresholds)
        total = rules.accuracy_ratio + rules.format_ratio
        reward = (rules.accuracy_ratio * parts["accuracy"] + rules.format_ratio * form) / total
        components = {name: parts[name] for name in _COMPONENTS}
        return RewardResult(reward, parts["accuracy"], Status.OK, components, (block or "").strip(), "")

    def _measured(self, boxes: Boxes, truth: Boxes, *, rules: Rules, thresholds: tuple[float, ...]) -> dict[str, float]:
        if len(boxes) > len(truth) + MAX_SURPLUS:
            return dict.fromkeys(set(_COMPONENTS) - {"format", "num_boxes", "num_invalid"}, 0.0)
        scene = Scene(boxes.images, truth.images)
        completeness = rules.ratios.get("iou_completeness", 0.0)
        parts = {}
        for name, labels_first in (("iou_max_iou_first", False), ("iou_max_label_first", True)):
            levels = [scene.level(threshold, labels_first=labels_first) for threshold in thresholds]
            parts["mean_iou"] = math.fsum(level.mean_iou for level in levels) / len(levels)
            parts["completeness"] = math.fsum(level.completeness for level in levels) / len(levels)
            parts[name] = (1.0 - completeness) * parts["mean_iou"] + completeness * parts["completeness"]
        precisions = [scene.average_precision(threshold) for threshold in COCO]
        parts |= {"map": math.fsum(precisions) / len(COCO), "map50": precisions[0], "map75": precisions[5]}
        wrong = scene.count_difference() if self._by_count else scene.num_unmatched()
        parts["count_penalty"] = COUNT_PENALTY**wrong
        weights = {name: rules.ratios.get(name, 0.0) for name in METRICS}
        quality = math.fsum(weights[name] * parts[name] for name in METRICS) / math.fsum(weights.values())
        return {**parts, "accuracy": min(1.0, quality * parts["count_penalty"])}


_FEEDBACK = "Give the boxes as one JSON list between <answer> and </answer>, each tag on a line of its own."


@cache
def _one_thread() -> ThreadPoolExecutor:
    """Where answers are judged, one at a time: each thread more would take the interpreter from the event loop."""
    return ThreadPoolExecutor(1, thread_name_prefix="detection")
