"""What a row of a detection set says: the true boxes, and the rules that ROLL's rows carry. None of it is changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentenv.errors import AgentEnvError, DataError
from agentenv.rewards._detection_text import Box, Boxes, answer_block, boxes_of, read_boxes
from agentenv.rewards.types import is_finite

METRICS = ("iou_max_label_first", "iou_max_iou_first", "map", "map50", "map75")
RATIOS = (*METRICS, "iou_completeness")
MAX_TRUTH = 200
"""True boxes of a row: pairing is cubic in those that lie on one another."""
NORMALISED = 1000.0
"""The side of an image in normalised coordinates."""
_STAGES = ((0.1, 0.85), (0.25, 0.95))
_LAST_STAGE = 0.99


@dataclass(frozen=True, slots=True)
class Rules:
    """How boxes are paid."""

    ratios: Mapping[str, float]
    """Weights of `METRICS`, and what of the first two is completeness (`iou_completeness`), each 0..1."""
    format_ratio: float
    accuracy_ratio: float
    in_pixels: bool
    """Whether predicted boxes are in pixels, and true ones in thousandths of the image."""


def checked_rules(rules: Rules, where: str, error: type[AgentEnvError]) -> Rules:
    """The rules, if they can be followed.

    Raises:
        AgentEnvError: of this class; they cannot.
    """
    ratios = rules.ratios
    if not isinstance(ratios, Mapping) or not ratios.keys() <= set(RATIOS):
        raise error(f"{where}: expected ratios of {', '.join(RATIOS)}, got {ratios!r:.200}. Change them.")
    if not all(is_finite(value) and 0 <= value <= 1 for value in ratios.values()):
        raise error(f"{where}: expected ratios from 0 to 1, got {dict(ratios)!r:.200}. Change them.")
    if not any(ratios.get(name) for name in METRICS):
        raise error(f"{where}: expected a ratio above 0 of {', '.join(METRICS)}, got {dict(ratios)!r:.200}. Set one.")
    parts = (rules.format_ratio, rules.accuracy_ratio)
    if not all(is_finite(part) and part >= 0 for part in parts) or sum(parts) <= 0:
        raise error(
            f"{where}: expected format_ratio and accuracy_ratio from 0 on, not both 0, got {parts!r}. Change it."
        )
    if not isinstance(rules.in_pixels, bool):
        raise error(f"{where}: expected true or false for pixels, got {rules.in_pixels!r:.80}. Change it.")
    return rules


def row_of(label: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """ROLL's columns of a row: `ground_truth`, ratios and `verifier_parm`, from the label or from `reward_model`.

    Raises:
        DataError: there is no ground truth.
    """
    column = _json("reward_model", metadata.get("reward_model"))
    if isinstance(label, str) and label.lstrip()[:1] == "{":
        label = _json("label", label)
    own = label if isinstance(label, Mapping) else {} if _is_empty(label) else {"ground_truth": label}
    row = {**column, **own}
    if _is_empty(row.get("ground_truth")):
        raise _refused("ground_truth", "boxes in the label or in reward_model", row.get("ground_truth"))
    return row


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def rules_of(row: Mapping[str, Any], default: Rules) -> Rules:
    """The rules of a row: its own where it has any, else the default ones.

    Raises:
        DataError: they cannot be followed.
    """
    given = _json("verifier_parm", row.get("verifier_parm"))
    ratios = _json("det_reward_ratio", given.get("det_reward_ratio"))
    own: dict[str, Any] = {
        "ratios": {name: value for name, value in ratios.items() if value is not None} or None,
        "format_ratio": row.get("format_ratio"),
        "accuracy_ratio": row.get("accuracy_ratio"),
        "in_pixels": given.get("det_verifier_normalized"),
    }
    rules = replace(default, **{name: value for name, value in own.items() if value is not None})
    return checked_rules(rules, "DetectionReward: a row", DataError)


def truth_of(row: Mapping[str, Any]) -> Boxes:
    """The true boxes: a list of them or of lists, one per image, or the text of one, also in `<answer>` tags.

    Raises:
        DataError: it is none, or holds what is no box, or too many.
    """
    given = row["ground_truth"]
    if isinstance(given, str):
        found = read_boxes(answer_block(given)[0] or given)
    else:
        found = boxes_of(given) if isinstance(given, list | tuple) else None
    if found is None or found.num_invalid or not found.whole:
        form = "a list of {'bbox_2d': [x1, y1, x2, y2], 'label': …} with x1 <= x2 and y1 <= y2"
        raise _refused("ground_truth", form, given)
    if len(found) > MAX_TRUTH:
        raise _refused("ground_truth", f"at most {MAX_TRUTH} boxes", len(found))
    return found


def normalised(boxes: Boxes, metadata: Mapping[str, Any]) -> Boxes:
    """Boxes in pixels as boxes in thousandths of their images, rounded down as true ones are.

    Raises:
        DataError: the row does not say how large its images are.
    """
    sizes = image_sizes(metadata)
    if len(sizes) < len(boxes.images):
        sizes = [*sizes, *sizes[-1:] * (len(boxes.images) - len(sizes))]
    images = [tuple(_scaled(box, *size) for box in image) for image, size in zip(boxes.images, sizes, strict=False)]
    return replace(boxes, images=tuple(tuple(sorted(set(image))) for image in images))


def image_sizes(metadata: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Width and height of each image in pixels, from `image_size`, one pair or a list of pairs.

    Raises:
        DataError: there are none.
    """
    given = metadata.get("image_size")
    pairs: Any = given if isinstance(given, list | tuple) and given and isinstance(given[0], list | tuple) else [given]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(is_finite(x) and x >= 1 for x in pair):
            raise _refused("image_size", "[width, height] in pixels, as boxes in pixels need", given)
    return [(float(width), float(height)) for width, height in pairs]


def stage_threshold(metadata: Mapping[str, Any]) -> float:
    """The threshold that rises in training: .85, .95 after a tenth of it and .99 after a quarter.

    By `global_step` and `max_steps`; without a length of training it is at its beginning.

    Raises:
        DataError: they are no numbers.
    """
    step, steps = (metadata.get(name) or 0 for name in ("global_step", "max_steps"))
    if not is_finite(step) or not is_finite(steps):
        raise _refused("global_step and max_steps", "numbers", (step, steps))
    done = step / steps if steps > 0 else 0.0
    return next((threshold for end, threshold in _STAGES if done <= end), _LAST_STAGE)


def _scaled(box: Box, width: float, height: float) -> Box:
    x1, x2 = (float(int(x / width * NORMALISED)) for x in (box.x1, box.x2))
    y1, y2 = (float(int(y / height * NORMALISED)) for y in (box.y1, box.y2))
    return Box(box.label, x1, y1, x2, y2)


def _json(name: str, value: Any) -> Mapping[str, Any]:
    """A column that is an object, or its JSON; nothing is one without members."""
    if _is_empty(value):
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise _refused(name, "an object or its JSON", value) from error
    if not isinstance(found, Mapping):
        raise _refused(name, "an object or its JSON", value)
    return found


def _refused(name: str, expected: str, got: Any) -> DataError:
    return DataError(f"DetectionReward: {name}: expected {expected}, got {got!r:.200}. Mend or remove the row.")
