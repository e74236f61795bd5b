"""Scores answers by reasoning-gym's own scorers, in a worker of `agentenv.rewards.pool`: never in a process of ours.

What its scorers do wrong is mended around them: what they would execute must be data (`data_only.py`) and is scored in
a child that has nothing (`confined.py`); a full score must be earned (`repairs.py`); what they raise is the answer's
fault only where the item's own answer does not make them raise.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from agentenv.errors import DataError
from agentenv.rewards._worker import DeadlineReached
from agentenv_envs.reasoning_gym.confined import TookTooMuch, in_child
from agentenv_envs.reasoning_gym.data_only import refusal
from agentenv_envs.reasoning_gym.hazards import EXECUTED
from agentenv_envs.reasoning_gym.repairs import repaired, says_more

TASK = f"{__name__}:handle"
_NOTHING = (None, "", "zzz")
"""What no credit may be had for."""


def request_of(entry: Mapping[str, Any], answer: str, *, partial: bool, cpu_s: float) -> dict[str, Any]:
    """What a pool is asked; its `function` names what a worker makes before the answer's time begins."""
    dataset = [str(entry["metadata"].get("source_dataset")), json.dumps(entry.get("config") or {}, sort_keys=True)]
    return {
        "task": TASK, "function": json.dumps(dataset), "entry": dict(entry), "answer": answer, "partial": partial,
        "cpu_s": cpu_s,
    }  # fmt: skip


def prepare(request: dict[str, Any]) -> None:
    """Make the dataset, which takes some datasets seconds; one that cannot be made is refused with the first answer."""
    with contextlib.suppress(DataError):
        _scorer(*json.loads(request["function"]))


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """`{"outcome", "value", "credit", "detail"}` of a request; see `request_of`.

    outcome: scored, parse_error or timeout. value: the scorer's, after repairs. credit: what of it was earned, which is
    less where no answer has as much, or where it is for an answer that merely contains the right one.

    Raises:
        DataError: the entry is none of these datasets, or its own answer cannot be scored.
    """
    entry, answer = _restored(request["entry"]), request["answer"]
    name, config = json.loads(request["function"])
    scorer = _scorer(name, config)
    if name in EXECUTED and (reason := refusal(name, answer)):
        return _outcome("parse_error", detail=reason)
    judge = functools.partial(_judged, scorer, answer, entry, partial=request["partial"])
    if name not in EXECUTED:
        return judge()
    try:
        found: dict[str, Any] = in_child(functools.partial(_told, judge), cpu_s=request["cpu_s"])
    except TookTooMuch as end:
        return _outcome("timeout", detail=f"the scorer gave no result: {end}")
    if "data_error" in found:
        raise DataError(found["data_error"])
    return found


def _told(judge: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """In the child: what goes wrong, as a result too."""
    try:
        return judge()
    except MemoryError:
        return _outcome("timeout", detail="the scorer took more memory than it may")
    except DataError as error:
        return {"data_error": str(error)}


def _outcome(outcome: str, value: float = 0.0, credit: float = 0.0, detail: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "value": value, "credit": credit, "detail": detail}


def _judged(scorer: Any, answer: str, entry: dict[str, Any], *, partial: bool) -> dict[str, Any]:
    try:
        value = _score(scorer, answer, entry)
    except (DeadlineReached, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - whether it is the answer's fault is told by the item's own answer
        _require_sound(scorer, entry, error)
        return _outcome("parse_error", detail=f"the scorer cannot read it: {type(error).__name__}: {error}"[:300])
    value = repaired(str(entry["metadata"]["source_dataset"]), answer, entry, value)
    if says_more(answer, entry["answer"]):
        return _outcome("scored", value, detail="it holds the right answer, and more")
    return _outcome("scored", value, _credit(scorer, answer, entry, value) if partial else float(value >= 1.0))


def _score(scorer: Any, answer: str | None, entry: dict[str, Any]) -> float:
    value = float(scorer.score_answer(answer, entry))
    if not math.isfinite(value):
        raise ValueError(f"a score of {value}")
    return min(1.0, max(0.0, value))


def _require_sound(scorer: Any, entry: dict[str, Any], error: Exception) -> None:
    """Refuse an entry whose own answer makes the scorer raise as well.

    Raises:
        DataError: it does.
    """
    try:
        _score(scorer, entry["answer"], entry)
    except (DeadlineReached, MemoryError):
        raise
    except Exception as same:  # noqa: BLE001 - whatever it is, this entry cannot be used
        raise DataError(
            f"label: expected an entry that its dataset can score, got {type(same).__name__}: {same}. Make it anew."
        ) from error


def _credit(scorer: Any, answer: str, entry: dict[str, Any], value: float) -> float:
    """The value, or 0 where it is no more than no answer has, or is for a right answer in a longer one."""
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
    """A dataset to score with; made once for each name and settings, as making some takes a second."""
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


def _restored(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry as its dataset made it: JSON has no tuples, and two scorers compare with them."""
    name = entry["metadata"].get("source_dataset")
    metadata = _tuples(entry["metadata"]) if name in ("arc_agi", "rearc") else entry["metadata"]
    return {**entry, "metadata": metadata}


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value
