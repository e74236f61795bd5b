"""Checkers: a dataset's own judges. They run here, on a value that the policy chose."""

from __future__ import annotations

from typing import Any

from agentenv.errors import InfraError
from agentenv.sandbox.grading.compare import Checker


def checked(checker: Checker, given: Any, expected: Any, got: Any) -> bool:
    """What the checker says of `got`.

    One that raises on `got` but accepts the expected value has met an answer that it cannot read, which is wrong.

    Raises:
        InfraError: it raises on the expected value too, or answers something else than a bool: it judges nothing.
    """
    try:
        return _called(checker, given, expected, got)
    except InfraError:
        if _called(checker, given, expected, expected):
            return False
        raise


def _called(checker: Checker, given: Any, expected: Any, got: Any) -> bool:
    try:
        good = checker(given, expected, got)
    except Exception as error:
        raise InfraError(
            f"checker {getattr(checker, '__name__', checker)!r}: expected a bool, got {type(error).__name__}: "
            f"{str(error)[:200]}. Let it answer False for what it cannot read."
        ) from error
    if not isinstance(good, bool):
        raise InfraError(f"checker {getattr(checker, '__name__', checker)!r}: expected a bool, got {good!r:.200}.")
    return good
