"""Syntax trees of Python source."""

from __future__ import annotations

import ast
import threading
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def parse_source(source: str | bytes, mode: str = "exec") -> Any:
    """Return what `ast.parse` returns.

    CPython counts the depth of the tree for all threads together, and raises SystemError if they take turns
    (python/cpython#106905).

    Raises:
        SyntaxError, ValueError, RecursionError: it is not Python.
    """
    with _ONE_AT_A_TIME:
        try:
            return ast.parse(source, mode=mode)
        except MemoryError as error:  # what CPython's parser raises for source that is nested too deep for its stack
            raise RecursionError("source that is nested too deep to parse") from error


def truth_of(test: ast.expr) -> bool | None:
    """Return whether an expression is true, if that does not depend on what names stand for; else None."""
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items) | ast.Dict(keys=items):
            return bool(items) if not any(isinstance(each, ast.Starred | None) for each in items) else None
        case ast.Lambda() | ast.GeneratorExp():
            return True
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return None if (truth := truth_of(operand)) is None else not truth
        case ast.BoolOp(op=op, values=values):
            decisive = isinstance(op, ast.Or)  # one true value decides an `or`, a false one an `and`
            truths = set(map(truth_of, values))
            return decisive if decisive in truths else None if None in truths else not decisive
        case ast.Compare(left=left, ops=[ast.Eq() | ast.GtE() | ast.LtE()], comparators=[right]):
            return ast.dump(left) == ast.dump(right) or None
    return None
