r"""Compare answers with math-verify, in a worker process of `pool.py`, under its limits.

Errors of math-verify 0.9 that this module fixes: small terms taken for zero, an irrational gold matched by a decimal,
`12.5%` against `12.5`, a gold `0.333` against `1/3`, anagrams of words, text behind the first number, `5 6` read as a
sum, any two equations without a solution, the last side of a false equation, letters that it takes for units,
`\phantom`, `\ldots`, `10^2^3`, `(3,\infty]`, `(1,2)` for `\{1,2\}`, and what `latex.py` writes in another way.

Errors that remain:
- accepted though different: variables in another case (`x` equals `X`), `a = 5` for a bare `5`, other units, another
  order where the label has neither brackets nor names (`2, 1` for `1, 2`);
- refused though equal: `e^{i\pi}` for `-1`, `2 to 1` for `2:1`, decimals for an irrational gold, number words
  ("eighteen");
- refused on purpose, since the task's own words would be right otherwise: `\frac{\pi}{6}` for `30^\circ`, `2x = 6` for
  `x = 3`, `x^2 < 1` for `-1 < x < 1`, `2516_8` for `1358`, sums and products for a number (`9 + 9`, `123\cdot456`),
  integrals, sums, limits, determinants and the like, unless the label has one. `2^{10}`, `10!` and `\sqrt{324}` are
  numbers. `2m` is a product, `2 m` and `2\text{m}` are meters.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

from agentenv.core.arguments import label_error
from agentenv.errors import DataError
from agentenv.rewards.rules.math import values
from agentenv.rewards.rules.math.answers import MATH_WORDS, Number, is_text, plain_verdict, read_number
from agentenv.rewards.rules.math.latex import in_radians, kind, one_spelling, readable
from agentenv.rewards.types import Status
from agentenv.rewards.workers.main import DeadlineReached

_MATHEMATICAL = re.compile(r"[0-9\\^_=+*/<>{}|√π∞]")
"""A digit, a command or an operator."""
_EQUALS = re.compile(r"(?<![\\<>!])=")
_ROUNDED = re.compile(r"((?:.*=)?)([^=]+?) ?(?:\\approx|≈) ?(-?[0-9]+\.[0-9]+)")
_SEVERAL_NUMBERS = re.compile(r"(?<![_0-9.])[0-9.]+ +[0-9]")
_PARTLY_READ = re.compile(
    r"\\(?:approx|sim|simeq|to|rightarrow|Rightarrow|implies|ne|neq|[lc]?dots)\b|[≈→…]|\\[hv]?phantom\b"
    r"|(?:\\infty|∞)\s*(?:\\right\s*)?\]|\[\s*-?\s*(?:\\infty|∞)"
    r"|(?:\^|\*\*)\s*(?:\{[^{}]*\}|[0-9]+|[A-Za-z])\s*(?:\^|\*\*)|^[A-Za-z]'+$"
)
_OPERATION = re.compile(
    r"\\(?:i{0,3}o?int|sum|prod|lim|limsup|liminf|det|gcd|lcm|max|min|bmod|pmod|mod|div|nabla)(?![A-Za-z])|[∫∬∑∏÷∂∇]"
    r"|\\begin ?\{[vV]matrix\}|(?<![A-Za-z\\])(?:gcd|lcm|det|mod|max|min|tr|rank)(?![A-Za-z])|[A-Za-z]'+ ?\("
    r"|\\frac ?\{ ?(?:d|\\partial)(?: ?\^ ?\{? ?[0-9] ?\}?)? ?[A-Za-z]? ?\} ?\{ ?(?:d|\\partial) ?[A-Za-z]"
)
_LEFT_TO_DO = "it leaves an operation to do, as the task's own words may"
_SUBSCRIPT = re.compile(r"_ ?\{[^{}]*\}")
_LOST_SUBSCRIPT = re.compile(r"(?<![\w^_.])[0-9.]+(?: ?\^ ?(?:[0-9]|\{ ?[0-9]+ ?\}))?\s*_")
"""A subscript of a number that is not a base: math-verify reads the number without it."""
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}")


def prepare(request: dict[str, Any]) -> None:
    """Import and warm up what would delay the first request."""
    handle({"answer": "x^2+1", "golds": ("1+x^2",)})


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Compare a request's `answer` with its `golds`: `status` ok or parse_error, `correct` if any gold matches.

    Raises:
        DataError: no gold matches, and one cannot be compared.
    """
    unusable: DataError | None = None
    result: dict[str, Any] = {}
    for gold in request["golds"]:
        try:
            status, correct, detail = _compare(request["answer"], gold)
        except DataError as error:
            unusable = unusable or error
            continue
        if correct:
            return {"status": status.value, "correct": True, "detail": ""}
        if not result or status is Status.OK:
            result = {"status": status.value, "correct": False, "detail": detail}
    if unusable is not None:
        raise unusable
    return result


def _compare(answer: str, gold: str) -> tuple[Status, bool, str]:
    """Return the status, True if the answer is right, and a detail.

    Raises:
        DataError: the gold cannot be compared.
    """
    plain = plain_verdict(answer, gold)
    if plain is not None:
        return Status.OK, plain, ""
    try:
        expected = _parse_gold(gold)
    except (DeadlineReached, MemoryError) as error:
        limit = str(error) if isinstance(error, DeadlineReached) else "the memory of a check"
        raise label_error(f"an answer that can be compared in {limit}", gold) from error
    if expected is None:
        if _MATHEMATICAL.search(gold) is None:  # not meant for math-verify
            return Status.OK, False, ""
        raise label_error("an answer that math-verify can read", gold)
    if rounded := _ROUNDED.fullmatch(answer):  # it claims what `0.33 = 1/3` does, which has to be true
        answer = f"{rounded[1]}{rounded[3]}={rounded[2]}"
    if reason := _why_unreadable(answer, words=read_number(gold) is None):
        return Status.PARSE_ERROR, False, reason
    last_side = _EQUALS.split(_SUBSCRIPT.sub("", answer))[-1]  # outside of subscripts as of `sum_{k=1}`
    if _OPERATION.search(last_side) and not _OPERATION.search(gold):
        return Status.OK, False, _LEFT_TO_DO
    try:
        value = _parse(answer)
        if value is None:
            return Status.PARSE_ERROR, False, "math-verify cannot read the answer as an expression"
        links = list(values.relations(value))
        if read_number(gold) is not None and not values.is_written_out(links[-1].rhs if links else value):
            return Status.OK, False, _LEFT_TO_DO
        return Status.OK, _is_right(expected, value, gold, answer), ""
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the gold compares with itself, so it is the answer that does not
        return Status.PARSE_ERROR, False, f"the answer cannot be compared: {type(error).__name__}: {error}"[:500]


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> Any | None:
    """Return the sympy expression of a gold that can be compared (at least with itself), or None."""
    try:
        number = read_number(gold)
        if number is not None and number.places is None and not number.percent:
            from sympy import Rational  # type: ignore[import-untyped]

            return Rational(number.value.numerator, number.value.denominator)
        if _LOST_SUBSCRIPT.search(readable(one_spelling(gold))):
            return None
        expected = values.value_of(_parse(gold), gold)
        if getattr(expected, "is_number", False):
            values.exact(expected)  # every comparison does, so that a number that takes too long is the label's fault
        return expected if expected is not None and _verify(expected, expected, None) else None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - this gold cannot be used, for any reason
        return None


def _parse(answer: str) -> Any | None:
    """Return the sympy expression of the whole answer, or None.

    It uses only the LaTeX reader: math-verify's plain-expression reader takes a number out of the middle of a text.
    """
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
    from math_verify import LatexExtractionConfig, parse

    # Units are gone already: math-verify's own list has `h`, of `2\pi h`, and `m`, of `2m`.
    normal = NormalizationConfig(malformed_operators=True, nits=True)
    found = parse(
        f"${readable(one_spelling(answer))}$",
        [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return values.ascending(found[0]) if found else None


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """Return math-verify's grader, whose comparisons are replaced where they err: they are called for parts too."""
    from math_verify import grader

    grader.sympy_compare_relational = values.sound(grader.sympy_compare_relational)
    grader.sympy_solve_and_compare = values.sound_solutions(grader.sympy_solve_and_compare)
    grader.sympy_numeric_eq = values.sound_numbers(grader.sympy_numeric_eq)
    compare = grader.sympy_symbolic_eq
    grader.sympy_symbolic_eq = lambda gold, answer: compare(
        values.exact(gold), values.exact(answer)
    )  # decimals are not rounded
    return grader


def _is_right(gold: Any, value: Any, gold_text: str, answer: str) -> bool:
    """Return True if a value is the gold one and is written as one."""
    from sympy import Eq, Expr, I, Interval, Set, Tuple

    written, expected = (kind(readable(one_spelling(text))) for text in (answer, gold_text))
    if {written, expected} == {"set", "tuple"}:
        return False
    in_gold, in_answer = (
        getattr(side, "_unsorted_args", ()) if isinstance(side, Set) else () for side in (gold, value)
    )
    points = all(isinstance(item, Tuple | Interval) for item in in_answer)  # written twice, it is still one
    names = {item.lhs for item in in_gold if isinstance(item, Eq)}
    is_ordered = written == "tuple" or (len(names) == len(in_gold) and next(values.relations(value), None) is None)
    if expected == "list" and is_ordered and in_gold:
        gold = Tuple(*in_gold)
        in_answer = (value.start, value.end) if isinstance(value, Interval) else in_answer
        value = Tuple(*in_answer) if in_answer else value
    elif in_gold and not points and len(in_gold) != len(in_answer) and {written, expected} != {"set"}:
        return False
    if isinstance(gold, Set):
        if not all(values.is_solved(link) for link in values.relations(value) if not isinstance(link, Eq)):
            return False
        gold, value = values.union_of(gold, gold_text), values.union_of(value, one_spelling(answer))
    if "\\sqrt{-" in answer + gold_text and isinstance(gold, Expr) and isinstance(value, Expr):
        gold, value = (side.subs({name: I for name in side.free_symbols if name.name == "i"}) for side in (gold, value))
    return (
        _verify(gold, value, read_number(answer))
        and not _is_untrue(value, answer)
        and not _has_false_link(value, answer)
    )


def _is_untrue(value: Any, text: str) -> bool:
    """Return True if an equation in the value of a text never holds: neither with degrees as numbers nor as angles."""
    if not values.is_false(value, text):
        return False
    if (angles := in_radians(one_spelling(text))) == one_spelling(text):
        return True
    other = _parse(angles)
    return next(values.relations(other), None) is None or values.is_false(other, angles)


def _has_false_link(value: Any, answer: str) -> bool:
    """Return True if `a = b = c`, of which math-verify has read only `c`, has a link that never holds."""
    sides = _EQUALS.split(answer)
    if len(sides) < 3 or next(values.relations(value), None) is not None:
        return False
    for left, right in pairwise(sides):
        try:
            if _is_untrue(_parse(link := f"{left}={right}"), link):
                return True
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a side that cannot be read claims nothing
            continue
    return False


def _verify(gold: Any, pred: Any, number: Number | None) -> bool:
    empty = [bool(getattr(value, "is_empty", False)) for value in (gold, pred)]
    if empty[0] is not empty[1]:  # math-verify takes `x < oo`, and any inequality of numbers, for empty
        return False
    is_decimal = number is not None and number.places is not None
    if is_decimal and getattr(gold, "is_number", False) and gold.doit().is_rational is False:
        return False
    options = {"strict": True, "allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    return bool(_math_verify().verify(gold, pred, **options))


def _why_unreadable(answer: str, *, words: bool) -> str:
    """Return why math-verify must not read an answer, of which it would read a part; empty if it may.

    math-verify reads words among mathematics as products of variables, slowly; without `words` they are refused.
    """
    if is_text(answer) or (not words and any(not MATH_WORDS.fullmatch(word) for word in _WORD.findall(answer))):
        return "words where a number or an expression is expected"
    if _SEVERAL_NUMBERS.search(answer):
        return "several numbers without an operator between them"
    if found := _PARTLY_READ.search(answer) or _LOST_SUBSCRIPT.search(readable(one_spelling(answer))):
        return f"{found[0].strip()!r} is not part of an answer"
    return ""
