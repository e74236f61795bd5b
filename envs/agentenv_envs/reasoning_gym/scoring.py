"""Scores answers with reasoning-gym's own scorers, in a worker of `rewards.workers.pool`, never in the main process.

It works around the scorers' faults. Answers that they would execute must be data (`data_only.py`). A full score must be
earned (`repairs.py`). A scorer's exception is the answer's fault only if the item's own answer does not raise too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from agentenv.errors import DataError
from agentenv.rewards.workers.main import DeadlineReached
from agentenv_envs.reasoning_gym.data_only import EXECUTED, refusal
from agentenv_envs.reasoning_gym.repairs import repaired, says_more

TASK = f"{__name__}:handle"
_NOTHING = (None, "", "zzz")
"""Answers that must not earn credit."""


def request_of(entry: Mapping[str, Any], answer: str, *, partial: bool) -> dict[str, Any]:
    """Return a request to a pool; its `function` names what a worker prepares before the answer's time starts."""
    dataset = [str(entry["metadata"].get("source_dataset")), json.dumps(entry.get("config") or {}, sort_keys=True)]
    return {
        "task": TASK,
        "function": json.dumps(dataset),
        "entry": dict(entry),
        "answer": answer,
        "partial": partial,
    }


def prepare(request: dict[str, Any]) -> None:
    """Create the dataset, which can take seconds; one that cannot be created is refused with the first answer."""
    with contextlib.suppress(DataError):
        _scorer(*json.loads(request["function"]))


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Return `{"outcome", "value", "credit", "detail"}` of a request; see `request_of`.

    outcome: scored or parse_error. value: the scorer's, after repairs. credit: the earned part of it: less if
    an empty answer gets as much, or if the answer merely contains the right one.

    Raises:
        DataError: the entry does not belong to these datasets, or its own answer cannot be scored.
    """
    entry, answer = request["entry"], request["answer"]
    if entry["metadata"].get("source_dataset") in ("arc_agi", "rearc"):
        # As its dataset generated it: JSON has no tuples, and these two scorers compare with them.
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    name, config = json.loads(request["function"])
    scorer = _scorer(name, config)
    if name in EXECUTED and (reason := refusal(name, answer)):
        return _outcome("parse_error", detail=reason)
    return _judge(scorer, answer, entry, partial=request["partial"])


def _outcome(outcome: str, value: float = 0.0, credit: float = 0.0, detail: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "value": value, "credit": credit, "detail": detail}


def _judge(scorer: Any, answer: str, entry: dict[str, Any], *, partial: bool) -> dict[str, Any]:
    try:
        value = _score(scorer, answer, entry)
    except (DeadlineReached, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - the item's own answer shows if it is the answer's fault
        try:
            _score(scorer, entry["answer"], entry)
        except (DeadlineReached, MemoryError):
            raise
        except Exception as same:  # noqa: BLE001 - after any error this entry cannot be used
            raise DataError(
                f"label: expected an entry that its dataset can score, got {type(same).__name__}: {same}. Recreate it."
            ) from error
        return _outcome("parse_error", detail=f"the scorer cannot read it: {type(error).__name__}: {error}"[:300])
    value = repaired(str(entry["metadata"]["source_dataset"]), answer, entry, value)
    if says_more(answer, entry["answer"]):
        return _outcome("scored", value, detail="it contains the right answer and more")
    return _outcome("scored", value, _credit(scorer, answer, entry, value) if partial else float(value >= 1.0))


def _score(scorer: Any, answer: str | None, entry: dict[str, Any]) -> float:
    value = float(scorer.score_answer(answer, entry))
    if not math.isfinite(value):
        raise ValueError(f"a score of {value}")
    return min(1.0, max(0.0, value))


def _credit(scorer: Any, answer: str, entry: dict[str, Any], value: float) -> float:
    """Return the value, or 0 if an empty answer gets as much or the answer merely contains the right one."""
    if value >= 1.0:
        return 1.0
    floor = 0.0
    for nothing in _NOTHING:
        with contextlib.suppress(Exception):
            floor = max(floor, _score(scorer, nothing, entry))
    right = entry["answer"]
    contains = isinstance(right, str) and right in answer and right != answer
    return 0.0 if value <= floor or contains else value


@functools.lru_cache(maxsize=256)
def _scorer(name: str, config: str) -> Any:
    """Return a dataset to score with; cached by name and settings, because creating one may take a second."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS or name == "composite":
        raise DataError(
            f"label: expected an entry whose metadata.source_dataset is one of reasoning-gym's, got {name!r:.80}. "
            "Make the rows with `python -m agentenv_envs.reasoning_gym`."
        )
    try:
        return create_dataset(name, **{"seed": 0, "size": 10, **json.loads(config)})
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"label: expected settings that {name} takes, got {config:.200}: {error}.") from error


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value
