"""Checks that an answer is data, for the nine scorers that would execute it as Python: a list of what it may contain.

An answer that passes can neither name an object, nor call anything but functions of school mathematics, nor compute a
large number. Everything else is refused before a scorer sees it. The check runs in the worker, because even parsing a
text can be made expensive.

The tables are of known problems of reasoning-gym 0.1.25's datasets that affect their scores; measured, not copied.
"""

from __future__ import annotations

import ast
import re

EXECUTED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Their scorers pass the answer to `eval`, or to sympy's `parse_expr`, which uses `eval`."""

REPAIRED = {
    "puzzle24": "its scorer ignores the given numbers and rounds: 6*4*1*1 solves every item",
    "countdown": "its scorer takes 12.5 for the numbers 12 and 5",
    "coin_flip": "its scorer takes 0 for most probabilities",
    "complex_arithmetic": "its scorer takes nan for every number",
    "game_of_life_halting": "its scorer takes any text for right",
    "propositional_logic": "its scorer takes a repeated premise of the question for a conclusion",
}
"""Datasets with a trivial way to the full score; `scoring.repaired` requires more."""

CHANCE = {
    "syllogism": 0.72, "circuit_logic": 0.61, "course_schedule": 0.56, "isomorphic_strings": 0.54, "ransom_note": 0.52,
    "game_of_life_halting": 0.51, "shortest_path": 0.39, "acre": 0.38, "mahjong_puzzle": 0.37, "self_reference": 0.37,
    "letter_counting": 0.36, "rotten_oranges": 0.36, "maze": 0.34, "gcd": 0.32,
}  # fmt: skip
"""Share of 300 items that the best constant answer solves, if it is 0.3 or more, at the default difficulty."""

SCORED_BY_CONFIG = frozenset({"decimal_arithmetic", "polynomial_equations", "puzzle24", "time_intervals"})
"""Their scorers read the settings that generated an item, so these settings are stored with the item."""

BY_TASK_ID = frozenset({"arc_agi", "rearc"})
"""Their items are variations of a few hundred puzzles: variations of one puzzle share a `task_id`."""

MAX_CHARS = 1024
_MAX_DEPTH = 30
_MAX_EXPONENT = 1000
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "exp", "log", "ln", "sqrt", "Abs", "abs",
})  # fmt: skip
_ARITHMETIC = re.compile(r"[0-9+\-*/() \n\r\t]*")
_PLAIN = re.compile(r"[0-9A-Z_ ,\n\r\t-]*")
"""No small letters: `eval` would find the scorer's own variables, such as `oracle_answer`, by name."""
_SIGNS = re.compile(r"(?:[-+~]\s*){8}")
_ALGEBRA = {"simple_integration", "intermediate_integration", "polynomial_multiplication"}
_LISTS = {"binary_matrix", "spiral_matrix", "string_insertion", "n_queens"}


def refusal(dataset: str, answer: str) -> str:
    """Return the reason why this dataset's scorer must not see the answer; empty if it may."""
    if len(answer) > MAX_CHARS and dataset not in _LISTS:
        return f"longer than {MAX_CHARS} characters"
    depth = deepest = 0
    for char in answer:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH or _SIGNS.search(answer):
        return "nested too deeply"
    if dataset in _LISTS and _PLAIN.fullmatch(answer):
        return ""
    if dataset in ("puzzle24", "countdown") and (not _ARITHMETIC.fullmatch(answer) or re.search(r"\*\s*\*", answer)):
        return "more than whole numbers, + - * / and parentheses"
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "no expression"
    allowed = _is_list(tree) if dataset in _LISTS else _is_algebra(tree, powers=dataset in _ALGEBRA)
    return "" if allowed else "more than data: an expression of numbers, variables and known functions is expected"


def _is_list(node: ast.expr) -> bool:
    """Return True for lists and tuples of texts and small numbers, without names or operators."""
    if isinstance(node, ast.List | ast.Tuple):
        return all(_is_list(item) for item in node.elts)
    return isinstance(node, ast.Constant) and (isinstance(node.value, str) or _is_number(node))


def _is_algebra(node: ast.expr, *, powers: bool) -> bool:
    match node:
        case ast.Constant():
            return _is_number(node)
        case ast.Name():
            return powers and (len(node.id) == 1 or node.id == "pi") and node.id.isascii()
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return _is_algebra(node.operand, powers=powers)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            return _is_algebra(node.left, powers=powers) and _is_algebra(node.right, powers=powers)
        case ast.BinOp(op=ast.Pow()):
            if not (powers and _is_algebra(node.left, powers=True) and _is_algebra(node.right, powers=True)):
                return False
            total = 1.0  # of the exponent's numbers: neither a large product nor a tower of powers
            for number in [item.value for item in ast.walk(node.right) if isinstance(item, ast.Constant)]:
                total *= max(1.0, abs(number)) if isinstance(number, int | float) else _MAX_EXPONENT
            return total < _MAX_EXPONENT and not _has_power(node.right) and not _has_power(node.left)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return powers and name in _FUNCTIONS and _is_algebra(argument, powers=True)
    return False


def _is_number(node: ast.Constant) -> bool:
    value = node.value
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _has_power(node: ast.expr) -> bool:
    """Return True for a power of a number alone: a power of a variable stays symbolic and costs nothing."""
    powers = [item for item in ast.walk(node) if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Pow)]
    return any(not any(isinstance(part, ast.Name) for part in ast.walk(power)) for power in powers)
