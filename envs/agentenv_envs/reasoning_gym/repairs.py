"""Stricter than the scorers, of which six give their full score for nothing (`hazards.py`), and many for too much."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_MOST_OF_A_WRONG_ANSWER = 0.25
_ALL_OR_NOTHING = ("game_of_life_halting", "complex_arithmetic")
_WORD = re.compile(r"[^\W\d_]{3}")
_MORE_CHARS = 8
Entry = Mapping[str, Any]


def repaired(dataset: str, answer: str, entry: Entry, value: float) -> float:
    """The scorer's value, or less where the answer is not what the question asks for."""
    solves = _REPAIRS.get(dataset)
    if value < 1.0 or solves is None or solves(answer, entry):
        return value
    return 0.0 if dataset in _ALL_OR_NOTHING else _MOST_OF_A_WRONG_ANSWER


def says_more(answer: str, right: Any) -> bool:
    """Whether it holds the item's own answer and words around it, or more of anything than that answer is long.

    Many scorers look for the right answer somewhere in a text: whoever says everything would be right.
    """
    if not isinstance(right, str) or not right.strip() or right.strip() not in answer:
        return False
    rest = answer.replace(right.strip(), "", 1).strip()
    return _WORD.search(rest) is not None or len(rest) > len(right) + _MORE_CHARS


def arithmetic(text: str) -> tuple[list[int], Fraction] | None:
    """The whole numbers of an expression of + - * /, and its exact value; None where it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        value = _value(tree)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)], value  # type: ignore[misc]


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _value(left), _value(right)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
    raise ValueError("not arithmetic")


def _reaches(target: int, numbers: Any, answer: str) -> bool:
    found = arithmetic(answer)
    return found is not None and sorted(found[0]) == sorted(numbers) and found[1] == target


def _puzzle24(answer: str, entry: Entry) -> bool:
    return _reaches(24, entry["metadata"]["numbers"], answer)


def _countdown(answer: str, entry: Entry) -> bool:
    return _reaches(entry["metadata"]["target"], entry["metadata"]["numbers"], answer)


def _coin_flip(answer: str, entry: Entry) -> bool:
    """As near as the scorer's own tolerance, which its credit for a common prefix gets around; 0 is 0 only."""
    given, right = (Fraction(text.replace(",", "")) for text in (answer, entry["answer"]))
    return abs(given - right) <= Fraction(1, 10_000) and (given != 0 or right == 0)


def _complex_arithmetic(answer: str, entry: Entry) -> bool:
    return re.search(r"nan|inf", answer, re.IGNORECASE) is None


def _game_of_life_halting(answer: str, entry: Entry) -> bool:
    return answer.strip().lower() == str(entry["answer"]).strip().lower()


def _propositional_logic(answer: str, entry: Entry) -> bool:
    return _formula(answer) not in {_formula(premise) for premise in entry["metadata"]["premises"]}


def _formula(text: str) -> str:
    """Without spaces and the parentheses around all of it."""
    text = re.sub(r"\s", "", text)
    while text.startswith("(") and text.endswith(")") and _closes_at(text) == len(text) - 1:
        text = text[1:-1]
    return text


def _closes_at(text: str) -> int:
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place
    return -1


_REPAIRS: Mapping[str, Callable[[str, Entry], bool]] = {
    "puzzle24": _puzzle24,
    "countdown": _countdown,
    "coin_flip": _coin_flip,
    "complex_arithmetic": _complex_arithmetic,
    "game_of_life_halting": _game_of_life_halting,
    "propositional_logic": _propositional_logic,
}
