"""Scores answers with reasoning-gym's own scorers, in a worker of `rewards.workers.pool`, never in the main process.

It works around the scorers' faults. Answers that they would execute must be data (`data_only.py`). A full score must be
earned: six scorers have a trivial way to it (`REPAIRED`), and many accept too much text. A scorer's exception is the
answer's fault only if the item's own answer does not raise too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from agentenv.errors import DataError
from agentenv.rewards.workers.main import DeadlineReached
from agentenv_envs.reasoning_gym.data_only import BY_TASK_ID, EXECUTED, refusal

_NOTHING = (None, "", "zzz")
"""Answers that must not earn credit."""
_MOST_OF_A_WRONG_ANSWER = 0.25
_ALL_OR_NOTHING = ("game_of_life_halting", "complex_arithmetic")
_WORD = re.compile(r"[^\W\d_]{3}")
_MORE_CHARS = 8
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def request_of(entry: Mapping[str, Any], answer: str, *, partial: bool) -> dict[str, Any]:
    """Return a request to a pool; its `function` names what a worker prepares before the answer's time starts."""
    dataset = [str(entry["metadata"].get("source_dataset")), json.dumps(entry.get("config") or {}, sort_keys=True)]
    item = {"entry": dict(entry), "answer": answer, "partial": partial}
    return {"task": f"{__name__}:handle", "function": json.dumps(dataset), **item}


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
    name, config = json.loads(request["function"])
    if name in BY_TASK_ID:
        # As its dataset generated it: JSON has no tuples, and these two scorers compare with them.
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    scorer = _scorer(name, config)
    if name in EXECUTED and (reason := refusal(name, answer)):
        return _outcome("parse_error", detail=reason)
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
    value = repaired(name, answer, entry, value)
    if says_more(answer, entry["answer"]):
        return _outcome("scored", value, detail="it contains the right answer and more")
    credit = float(value >= 1.0)
    if request["partial"] and not credit:
        # The value, unless an empty answer gets as much or it merely has the right one.
        floor = 0.0
        for nothing in _NOTHING:
            with contextlib.suppress(Exception):
                floor = max(floor, _score(scorer, nothing, entry))
        right = entry["answer"]
        contains = isinstance(right, str) and right in answer and right != answer
        credit = 0.0 if value <= floor or contains else value
    return _outcome("scored", value, credit)


def _outcome(outcome: str, value: float = 0.0, credit: float = 0.0, detail: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "value": value, "credit": credit, "detail": detail}


def _score(scorer: Any, answer: str | None, entry: dict[str, Any]) -> float:
    value = float(scorer.score_answer(answer, entry))
    if not math.isfinite(value):
        raise ValueError(f"a score of {value}")
    return min(1.0, max(0.0, value))


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


def repaired(dataset: str, answer: str, entry: Mapping[str, Any], value: float) -> float:
    """Return the scorer's value, or less if the answer does not satisfy the question."""
    if value < 1.0:
        return value
    metadata = entry["metadata"]
    match dataset:
        case "puzzle24":
            solved = _reaches(24, metadata["numbers"], answer)
        case "countdown":
            solved = _reaches(metadata["target"], metadata["numbers"], answer)
        case "coin_flip":
            # Within the scorer's own tolerance, which its credit for a common prefix circumvents; 0 only matches 0.
            probability, right = (Fraction(text.replace(",", "")) for text in (answer, entry["answer"]))
            solved = abs(probability - right) <= Fraction(1, 10_000) and (probability != 0 or right == 0)
        case "complex_arithmetic":
            solved = re.search(r"nan|inf", answer, re.IGNORECASE) is None
        case "game_of_life_halting":
            solved = answer.strip().lower() == str(entry["answer"]).strip().lower()
        case "propositional_logic":
            solved = _formula(answer) not in {_formula(premise) for premise in metadata["premises"]}
        case _:
            solved = True
    if solved:
        return value
    return 0.0 if dataset in _ALL_OR_NOTHING else _MOST_OF_A_WRONG_ANSWER


def says_more(answer: str, right: Any) -> bool:
    """Return True if the text has the right answer and words around it, or more other text than that answer is long.

    Many scorers search a text for the right answer: a policy that lists everything would be right.
    """
    if not isinstance(right, str) or not right.strip() or right.strip() not in answer:
        return False
    rest = answer.replace(right.strip(), "", 1).strip()
    return _WORD.search(rest) is not None or len(rest) > len(right) + _MORE_CHARS


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError("not arithmetic")


def _reaches(target: int, numbers: Any, answer: str) -> bool:
    """Return True if the answer is an expression of + - * / that has these numbers and exactly this value."""
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        value = _value(tree)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return sorted(used) == sorted(numbers) and value == target  # type: ignore[type-var]


def _formula(text: str) -> str:
    """Return the formula without spaces and outer parentheses."""
    text = re.sub(r"\s", "", text)
    while text.startswith("(") and text.endswith(")"):
        depth = 1
        for char in text[1:-1]:
            depth += (char == "(") - (char == ")")
            if depth == 0:  # the first parenthesis closes before the end
                return text
        if depth != 1:
            return text
        text = text[1:-1]
    return text
