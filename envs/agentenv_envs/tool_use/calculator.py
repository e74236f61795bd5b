"""The tool `calculator`: arithmetic, parsed as a syntax tree and evaluated in bounded time; no code is executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from agentenv._util.syntax import parse_source
from agentenv.tools.calling import ToolError

Number = int | float
MAX_CHARS = 500
MAX_BITS = 4096
"""Largest whole number: about 1,200 digits."""
_MAX_FACTORIAL = 400
_MAX_PLACES = 100

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "cos": math.cos, "exp": math.exp, "floor": math.floor, "gcd": math.gcd,
    "log": math.log, "log10": math.log10, "log2": math.log2, "max": max, "min": min, "round": round, "sin": math.sin,
    "sqrt": math.sqrt, "tan": math.tan,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Work out an arithmetic expression exactly where it has whole numbers only.

    Args:
        expression: Numbers, + - * / // % ** and brackets; pi, e; abs, ceil, cos, exp, factorial, floor, gcd, log,
            log10, log2, max, min, round, sin, sqrt, tan. For example "3 * (17 + 4) ** 2".
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"an expression has at most {MAX_CHARS} characters, this one has {len(expression)}.")
    try:
        value = _value(parse_source(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError as error:
        raise ToolError("division by zero.") from error
    except OverflowError as error:
        raise ToolError("the result is too large.") from error
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ToolError(f"the expression cannot be worked out: {message}.") from error
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ToolError("the result is too large, or no number.")
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp):
        return _bounded(_apply(node.op, _value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _bounded(_call(node.func.id, [_value(each) for each in node.args]))
    raise ToolError(f"{ast.unparse(node)[:60]!r} is not arithmetic that this calculator supports.")


def _apply(op: ast.operator, left: Number, right: Number) -> Any:
    whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Pow):  # unless it is so large that it would take long to compute
        if whole and abs(left) > 1 and right > 0:
            if int(left).bit_length() * right > 2 * MAX_BITS:
                raise ToolError("the result is too large.")
        elif isinstance(left, int) and left.bit_length() > 1000:
            left = float(left)
        return left**right
    if isinstance(op, ast.BitXor):
        raise ToolError("powers are written with **, not ^.")
    if isinstance(op, ast.Div) and whole and right and left % right == 0:
        return left // right  # exact, where a float would not be
    if type(op) not in _BINARY:
        raise ToolError(f"{type(op).__name__} is not an operator that this calculator supports.")
    return _BINARY[type(op)](left, right)


def _call(name: str, arguments: list[Number]) -> Any:
    if name == "factorial":
        if len(arguments) != 1 or not isinstance(arguments[0], int) or not 0 <= arguments[0] <= _MAX_FACTORIAL:
            raise ToolError(f"factorial takes one whole number from 0 to {_MAX_FACTORIAL}.")
        return math.factorial(arguments[0])
    if name not in _FUNCTIONS:
        raise ToolError(f"unknown function {name!r}. Functions: factorial, {', '.join(sorted(_FUNCTIONS))}.")
    if name == "round" and len(arguments) == 2 and not -_MAX_PLACES <= arguments[1] <= _MAX_PLACES:
        raise ToolError(f"round takes at most {_MAX_PLACES} places.")  # for whole numbers it computes 10 to that power
    return _FUNCTIONS[name](*arguments)


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number.")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the result is too large.")
    if not isinstance(value, int | float):
        raise ToolError(f"{value!r:.40} is not a number.")
    return value
