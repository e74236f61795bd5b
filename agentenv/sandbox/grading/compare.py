"""Comparison of results with expectations: values by strict types; texts by bytes, lines, tokens or floats."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any, Literal, get_args

from agentenv.errors import ConfigError, InfraError

TextMode = Literal["exact", "lines", "tokens", "floats", "contest", "livecodebench", "apps"]
"""`exact`: every character. `lines`: ignores white space at the end of lines and of the text. `tokens`: splits at white
space. `floats`: tokens, with numbers compared within a tolerance. Only ASCII white space counts.

`contest`: as checkers of contests compare. Tokens in their order, and numbers by their values: integers exactly, others
within 1e-5 of the expected one.

`livecodebench` and `apps` compare as the evaluators of these benchmarks do. `livecodebench`: lines without white space
around them; lines of numbers by their decimal values. `apps`: also without blank lines; numbers within a tolerance;
and in any order, both of lines and of the words of a line."""
TEXT_MODES: tuple[str, ...] = get_args(TextMode)

_BLANK = " \t\r\v\f"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_NUMERAL = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_MAX_NUMBER = 400
_ROUNDING = Decimal("1e-9")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Options of a comparison. By default types count: 1, 1.0 and True are different values. NaN equals only NaN."""

    rel_tol: float = 0.0
    abs_tol: float = 0.0
    """Tolerances of `math.isclose`. With a tolerance, int and float are interchangeable; bool is not."""
    int_as_float: bool = False
    """1 equals 1.0, even without a tolerance."""
    bool_as_int: bool = False
    """True equals 1, and False equals 0."""
    tuple_as_list: bool = False
    """(1, 2) equals [1, 2], for expectations stored as JSON."""

    def __post_init__(self) -> None:
        for name in ("rel_tol", "abs_tol"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
                raise ConfigError(f"Comparison.{name}: expected a finite number of at least 0, got {value!r:.200}.")
        for name in ("int_as_float", "bool_as_int", "tuple_as_list"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"Comparison.{name}: expected True or False, got {value!r:.200}.")

    @property
    def tolerant(self) -> bool:
        """True if there is a tolerance."""
        return self.rel_tol > 0 or self.abs_tol > 0


EXACT = Comparison()


def same_value(expected: Any, got: Any, how: Comparison = EXACT) -> bool:
    """Return True if `got`, which consists of built-in values, equals the expected value.

    The order of dict keys is ignored. Members of sets and keys of dicts are compared without a tolerance.
    """
    if how.bool_as_int:
        expected, got = (int(value) if isinstance(value, bool) else value for value in (expected, got))
    if type(expected) in (int, float) and type(got) in (int, float):
        return _same_number(expected, got, how)
    if how.tuple_as_list and isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        return _same_items(expected, got, how)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, (list, tuple)):
        return _same_items(expected, got, how)
    if isinstance(expected, dict):
        wanted, actual = _by_key(expected, how), _by_key(got, how)
        return actual.keys() == wanted.keys() and all(
            _same_items(items, actual[key], how) for key, items in wanted.items()
        )
    if isinstance(expected, (set, frozenset)):
        return bool(_typed(frozenset(expected), how) == _typed(frozenset(got), how))
    if isinstance(expected, complex):
        return _same_number(expected.real, got.real, how) and _same_number(expected.imag, got.imag, how)
    return bool(expected == got)


def _by_key(value: Mapping[Any, Any], how: Comparison) -> dict[Any, list[Any]]:
    """Return the items of each key, in order; only NaN, of which each is another key, has several."""
    items: dict[Any, list[Any]] = {}
    for key, item in value.items():
        items.setdefault(_typed(key, how), []).append(item)
    return items


def _same_items(expected: Any, got: Any, how: Comparison) -> bool:
    return len(expected) == len(got) and all(same_value(a, b, how) for a, b in zip(expected, got, strict=True))


def _same_number(expected: float, got: float, how: Comparison) -> bool:
    if type(expected) is not type(got) and not (how.tolerant or how.int_as_float):
        return False
    if expected != expected or got != got:
        return expected != expected and got != got
    if expected == got:
        return True
    try:
        return how.tolerant and math.isclose(expected, got, rel_tol=how.rel_tol, abs_tol=how.abs_tol)
    except OverflowError:  # an int beyond the range of floats
        return False


def _typed(value: Any, how: Comparison) -> Any:
    """Return a hashable key for a value, in which the types of its parts count as in `same_value`."""
    if isinstance(value, bool) and how.bool_as_int:
        return (int, int(value))
    if isinstance(value, float):
        if value != value:
            return (float, "nan")
        if how.int_as_float and value.is_integer():
            return (int, int(value))
        return (float, value)
    if isinstance(value, complex):
        return (complex, _typed(value.real, how), _typed(value.imag, how))
    if isinstance(value, tuple):
        return (tuple, tuple(_typed(item, how) for item in value))
    if isinstance(value, frozenset):
        return (frozenset, frozenset(Counter(_typed(item, how) for item in value).items()))
    return (type(value), value)


def same_text(expected: str, got: str, mode: TextMode, how: Comparison = EXACT) -> bool:
    """Return True if an output equals the expected one under `mode`; `how` has the tolerance of `floats`."""
    if mode == "exact":
        return expected == got
    if mode == "lines":
        return _lines(expected) == _lines(got)
    if mode == "livecodebench":
        return _same_in_livecodebench(expected, got)
    if mode == "apps":
        return _same_in_apps(expected, got)
    wanted, actual = _tokens(expected), _tokens(got)
    if mode == "tokens" or len(wanted) != len(actual):
        return wanted == actual
    if mode == "contest":
        return all(a == b or _is_close_numeral(a, b) for a, b in zip(wanted, actual, strict=True))
    for a, b in zip(wanted, actual, strict=True):
        numbers = max(len(a), len(b)) <= _MAX_NUMBER and _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)
        if a != b and not (numbers and math.isclose(float(a), float(b), rel_tol=how.rel_tol, abs_tol=how.abs_tol)):
            return False
    return True


def _lines(text: str) -> list[str]:
    lines = [line.rstrip(_BLANK) for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _tokens(text: str) -> list[str]:
    # Not one `split`: a call of C code on megabytes lets no other thread run.
    return [found[0] for found in re.finditer(r"[^ \t\r\n\v\f]+", text)]


def _is_close_numeral(expected: str, got: str) -> bool:
    """Return True if two tokens are the same integer, or a number and another one within 1e-5 of its value.

    Numbers with leading zeros are text. Zero allows for an error of rounding.
    """
    if max(len(expected), len(got)) > _MAX_NUMBER or not (_NUMERAL.fullmatch(expected) and _NUMERAL.fullmatch(got)):
        return False
    if expected.lstrip("+-").isdigit():
        return _without_error(got) == int(expected)
    wanted = float(expected)
    return abs(float(got) - wanted) <= (1e-5 * abs(wanted) or float(_ROUNDING)) < math.inf


def _same_in_livecodebench(expected: str, got: str) -> bool:
    """Compare as LiveCodeBench. Source: LiveCodeBench/LiveCodeBench, lcb_runner/evaluation/testing_util.py."""
    wanted, actual = ([line.strip() for line in text.strip().split("\n")] for text in (expected, got))
    different = ((a.split(), b.split()) for a, b in zip(wanted, actual, strict=False) if a != b)
    try:
        return len(wanted) == len(actual) and all(
            max(len(x), len(y)) <= _MAX_NUMBER and Decimal(x) == Decimal(y)
            for a, b in different
            for x, y in zip_longest(a, b, fillvalue="")
        )
    except InvalidOperation:
        return False


def _same_in_apps(expected: str, got: str) -> bool:
    """Compare as APPS, except that integers have no tolerance and repetitions count.

    Source: hendrycks/apps, eval/testing_util.py, where `YES NO` is right for every list of these two words.
    """
    lines = got.splitlines()
    if expected.strip() in ("\n".join(lines).strip(), "\n".join(line.strip() for line in lines).strip()):
        return True
    wanted = [line.strip() for line in expected.split("\n") if line]
    if wanted in (lines, actual := [line for line in lines if line]):
        return True
    try:
        if wanted and all(_same_numeral(a, b) for a, b in zip(wanted, actual, strict=True)):
            return True
    except (ValueError, ArithmeticError):  # lines that are not one number each, or of another count
        pass
    words, spoken = ([line.split() for line in part] for part in (wanted, actual))
    spoken = [line for line in spoken if line]
    if _in_any_order(words) == _in_any_order(spoken):
        return True
    try:
        rounded = ([[round(_number(word), 3) for word in line] for line in part] for part in (words, spoken))
        if _in_any_order(next(rounded)) != _in_any_order(next(rounded)):
            return False
        integers = Counter(int(word) for line in words for word in line if isinstance(_number(word), int))
        return not integers or integers <= Counter(_without_error(word) for line in spoken for word in line)
    except (ValueError, ArithmeticError):
        return False


def _in_any_order(lines: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return sorted(sorted(line) for line in lines)


def _same_numeral(expected: str, got: str) -> bool:
    """Return True if two words are the same number, or close ones where no integer is expected.

    Raises:
        ValueError: one of them is not a number, or too long.
        ArithmeticError: one of them is too large, or `nan`.
    """
    wanted, actual = _number(expected), _number(got)
    if isinstance(wanted, int):
        return _without_error(got) == wanted
    # As `numpy.allclose` says by default.
    return wanted == actual or abs(actual - wanted) <= 1e-8 + 1e-5 * abs(wanted) < math.inf


def _without_error(word: str) -> Decimal:
    """Return the integer that a number equals except for an error of rounding; otherwise the number.

    A float could not tell large integers apart.

    Raises:
        ArithmeticError: it is not finite.
    """
    value = Decimal(word)
    nearest = value.to_integral_value()
    return nearest if abs(value - nearest) <= _ROUNDING else value


def _number(word: str) -> float:
    """Return an integer or a float.

    Raises:
        ValueError: the word is neither, or too long.
    """
    if len(word) > _MAX_NUMBER:
        raise ValueError(word)
    try:
        return int(word)
    except ValueError:
        return float(word)


Checker = Callable[[Any, Any, Any], bool]
"""A custom judge: (input, expected, got) to True if right. It runs outside the sandbox on an untrusted `got`."""


# --- checkers ---------------------------------------------------------------------------------------------------------


def run_checker(checker: Checker, given: Any, expected: Any, got: Any) -> bool:
    """Return the checker's judgment of `got`.

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
