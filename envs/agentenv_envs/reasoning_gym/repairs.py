"""Stricter checks than the scorers': six have a trivial full score (`REPAIRED`), many accept too much text."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_MOST_OF_A_WRONG_ANSWER = 0.25
_ALL_OR_NOTHING = ("game_of_life_halting", "complex_arithmetic")
_WORD = re.compile(r"[^\W\d_]{3}")
_MORE_CHARS = 8
Entry = Mapping[str, Any]


def repaired(dataset: str, answer: str, entry: Entry, value: float) -> float:
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


def arithmetic(text: str) -> tuple[list[int], Fraction] | None:
    """Return the whole numbers of an expression of + - * /, and its exact value; None if it is not one."""
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
    parsed = arithmetic(answer)
    return parsed is not None and sorted(parsed[0]) == sorted(numbers) and parsed[1] == target


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
