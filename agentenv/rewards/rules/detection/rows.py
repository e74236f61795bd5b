"""Read boxes as models write them, and the rows of a detection set: the true boxes, and the rules in ROLL's rows.

Boxes are JSON or Python, fenced or cut off in the middle, and are read in time linear in the text. Rows are never
changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentenv._util.brief import brief
from agentenv._util.lenient_json import read_partial_list
from agentenv.core.arguments import is_finite
from agentenv.errors import AgentEnvError, DataError

MAX_CHARS = 200_000
"""Longer answers are not read."""
_MAX_COORDINATE = 1e9
_OPEN, _CLOSE = "<answer>", "</answer>"
_FENCE = re.compile(r"\s*(?:`{3,}\w{0,20})?\s*")
METRICS = ("iou_max_label_first", "iou_max_iou_first", "map", "map50", "map75")
RATIOS = (*METRICS, "iou_completeness")
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
    if not isinstance(ratios, Mapping) or not ratios.keys() <= set(RATIOS):
        raise error(f"{where}: expected ratios of {', '.join(RATIOS)}, got {brief(ratios)}.")
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
