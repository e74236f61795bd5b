"""Calls of checkers, the judges of a dataset. They run outside the sandbox on untrusted values."""

from __future__ import annotations

from typing import Any

from agentenv.errors import InfraError
from agentenv.sandbox.grading.compare import Checker


def run_checker(checker: Checker, given: Any, expected: Any, got: Any) -> bool:
    """Return the checker's judgement of `got`.

    If the checker raises on `got` but accepts the expected value, `got` is wrong: the checker cannot parse it.

    Raises:
        InfraError: the checker also raises on the expected value, or does not return a bool.
    """
    try:
        return _call_checker(checker, given, expected, got)
    except InfraError:
        if _call_checker(checker, given, expected, expected):
            return False
        raise


def _call_checker(checker: Checker, given: Any, expected: Any, got: Any) -> bool:
    try:
        good = checker(given, expected, got)
    except Exception as error:
        raise InfraError(
            f"checker {getattr(checker, '__name__', checker)!r}: expected a bool, got {type(error).__name__}: "
            f"{str(error)[:200]}. Return False for values that it cannot parse."
        ) from error
    if not isinstance(good, bool):
        raise InfraError(f"checker {getattr(checker, '__name__', checker)!r}: expected a bool, got {good!r:.200}.")
    return good
