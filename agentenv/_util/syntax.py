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
