r"""Compare answers with math-verify, in a worker process of `pool.py`, under its limits.

What values, equations and inequalities say is decided here, where math-verify is mistaken. To it, small terms are zero:
`\frac{2^{100}-1}{2^{100}}` equals `10^{-30}`, and `x > 10^{-20}` is `x > 10^{-30}`. It takes the last side of an answer
for its value, so that `8 = 7` was right for 7. It compares two equations by their solutions, so that any two without a
solution were equal, and `2x = 6`, which a task may begin with, was right for `x = 3`.

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
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from agentenv.core.arguments import label_error
from agentenv.errors import DataError
from agentenv.rewards.rules.math.answers import MATH_WORDS, Number, is_text, numbers_equal, plain_verdict, read_number
from agentenv.rewards.rules.math.latex import in_radians, kind, one_spelling, readable
from agentenv.rewards.types import Status
from agentenv.rewards.workers.main import DeadlineReached

_MAX_DIGITS = 500
"""Precision to which an irrational value that seems to be zero is computed."""
_TOLERANCE = 1e-9
_ROUNDED_BY = 0.01
"""The tolerance where decimals are part of a side, relative to the value."""
_IN_BASE = re.compile(r"n_\{([0-9]+)x([0-9a-z]+)\}")
_DECIMAL = re.compile(r"[0-9]*\.([0-9]+)")


def exact(value: Any) -> Any:
    """Return the value with its decimals as fractions, evaluated."""
    from sympy import Float, nsimplify  # type: ignore[import-untyped]

    return (nsimplify(value, rational=True) if value.has(Float) else value).doit()


def is_zero(value: Any) -> bool:
    """Return True if an exact value is zero, where its terms with the same symbols are added up; 1e-1000 is not."""
    from sympy import Add

    symbols = value.free_symbols
    coefficients: dict[Any, list[Any]] = {}
    for term in Add.make_args(value):
        coefficient, rest = term.as_independent(*symbols, as_Add=False)
        coefficients.setdefault(rest, []).append(coefficient)

    def is_zero_number(number: Any) -> bool:
        if number.is_Rational:
            return bool(number == 0)
        parts = number.evalf(2, maxn=_MAX_DIGITS).as_real_imag()
        return all(part == 0 or (part.is_Float and part._prec == 1) for part in parts)  # 1 means: no digit is certain

    return all(rest.is_zero or is_zero_number(Add(*found)) for rest, found in coefficients.items())


def sound_numbers(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Return math-verify's comparison of expressions by their value, but exact; it stays for matrices.

    Where a side is a decimal, numbers are equal to the precision of `numbers_equal`.
    """
    from math_verify.grader import get_pct_val
    from sympy import Float, Integer, MatrixBase, MatrixExpr

    def compared(gold: Any, answer: Any, *precision: int) -> bool:
        if isinstance(gold, MatrixBase | MatrixExpr) or isinstance(answer, MatrixBase | MatrixExpr):
            return compare(gold, answer, *precision)
        plain = [get_pct_val(side, side) for side in (gold, answer)]
        if all(isinstance(side, Integer) for side in plain):
            return bool(plain[0] == plain[1])
        a, b = exact(gold), exact(answer)
        if any(isinstance(side, Float) for side in plain) and a.is_number and b.is_number:
            return all(map(_near, a.as_real_imag(), b.as_real_imag()))
        return is_zero(a - b)

    return compared


def _near(gold: Any, answer: Any) -> bool:
    sides = [side if side.is_Rational else side.evalf(30) for side in (gold, answer)]
    if not all(side.is_Rational or side.is_Float for side in sides):  # infinite, or no number
        return bool(gold == answer)
    return numbers_equal(*(Number(Fraction(str(side)), places=0) for side in sides))


def is_written_out(value: Any) -> bool:
    r"""Return True if a value is a number without arithmetic left to do.

    Fractions, powers, roots, and functions of a number are numbers: `2^{10}`, `\sqrt{324}`, `\binom{5}{2}`; sums and
    products are not. Sets and other values without a sign of arithmetic are not judged.
    """
    from sympy import Expr, Function, I, Mul, NumberSymbol, Pow
    from sympy import Number as SympyNumber

    if not isinstance(value, Expr) or isinstance(value, SympyNumber | NumberSymbol) or value == I:
        return True
    if isinstance(value, Mul):
        factors = [part for part in value.args if abs(part) != 1 and part != I and not isinstance(part, NumberSymbol)]
        under = [part for part in factors if isinstance(part, Pow) and part.exp.is_negative and part.base != 10]
        over = [part for part in factors if part not in under and not (isinstance(part, Pow) and part.base == 10)]
        if len(over) > 1 or len(under) > 1:
            return False
    elif not isinstance(value, Pow | Function):
        return False
    return all(map(is_written_out, value.args))


def relations(value: Any) -> Iterator[Any]:
    """Yield the equations and inequalities in a value: in chains, sets and tuples too."""
    from sympy import And, FiniteSet, Tuple
    from sympy.core.relational import Relational  # type: ignore[import-untyped]

    if isinstance(value, Relational):
        yield value
    elif isinstance(value, And | FiniteSet | Tuple):
        for part in getattr(value, "_unsorted_args", value.args):
            yield from relations(part)


def is_false(value: Any, text: str) -> bool:
    """Return True if an equation in the value of a text never holds, as `8 = 7` and `x + 1 = x`."""
    from sympy import Eq

    return any(isinstance(link, Eq) and _holds(link, text) is False for link in relations(value))


def _holds(equation: Any, text: str) -> bool | None:
    """Return True if the sides are equal, and False if they differ by a number; None if it depends on a symbol.

    A side that is a decimal may be rounded, by less than one unit of the last digit that the text writes: `2/3 = 0.66`.
    """
    from sympy import Derivative, Float, simplify

    left, right = _number_of(equation.lhs), _number_of(equation.rhs)
    try:
        if left.free_symbols != right.free_symbols and not equation.has(Derivative):
            left, right = simplify(left), simplify(right)  # `0x` and `x - x` depend on no symbol
        if left.free_symbols != right.free_symbols:
            return None
        difference = simplify(exact(left) - exact(right))
        if difference.free_symbols or not difference.is_number:
            return None
        if is_zero(difference) or not equation.has(Float):
            return is_zero(difference)
        scale = 1.0 if left.free_symbols else abs(complex(left.evalf()))
        return abs(complex(difference)) <= _tolerance(equation, text, scale)
    except (TypeError, ValueError, AttributeError, NotImplementedError):  # no numbers: a side of `k = {1, 2}`
        return None


def _number_of(side: Any) -> Any:
    """Return a side with the values of its whole numbers in bases, which `latex.readable` writes as symbols."""
    found = {name: _IN_BASE.fullmatch(name.name) for name in side.free_symbols}
    return side.subs({name: int(match[2], int(match[1])) for name, match in found.items() if match})


def _tolerance(equation: Any, text: str, scale: float) -> float:
    for side in (equation.rhs, equation.lhs):  # models round from left to right
        places = [len(found[1]) for found in _DECIMAL.finditer(text) if side.is_Float and float(found[0]) == abs(side)]
        if places:
            return max(0.999 * 0.1 ** max(places), _TOLERANCE * scale)
    return _ROUNDED_BY * scale


def value_of(value: Any, text: str) -> Any:
    """Return the number that a true equation of numbers says, as 3 for `log_3(27) = 3`; another value as it is."""
    from sympy import And, Eq

    found = list(relations(value))
    if not isinstance(value, And | Eq) or not all(isinstance(link, Eq) and not link.free_symbols for link in found):
        return value
    return value if not all(_holds(link, text) for link in found) else found[-1].rhs


def ascending(value: Any) -> Any:
    """Return `1 < x < 2` for `2 > x > 1`; another value as it is."""
    from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]
    from sympy import GreaterThan, StrictGreaterThan

    links = getattr(value, "_unsorted_args", ())
    if not isinstance(value, And) or not all(isinstance(link, GreaterThan | StrictGreaterThan) for link in links):
        return value
    return And(*(link.reversed for link in reversed(links)), evaluate=False)


def union_of(value: Any, text: str) -> Any:
    """Return the numbers for which `x < 1 or x > 2` holds, as a set; another value as it is."""
    from sympy import And, FiniteSet, Union
    from sympy.core.relational import GreaterThan, LessThan, StrictGreaterThan, StrictLessThan

    kinds = (And, GreaterThan, LessThan, StrictGreaterThan, StrictLessThan)
    if not isinstance(value, FiniteSet) or " or " not in text or len(value.free_symbols) != 1:
        return value
    if not all(isinstance(each, kinds) for each in value.args):
        return value
    return Union(*(each.as_set() for each in value.args))


def is_solved(value: Any) -> bool:
    """Return True if every equation has a symbol, or a function, for a side and a number for the other.

    The other side of an inequality may have other symbols.
    """
    from sympy import Eq, Symbol
    from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

    def lone(side: Any, other: Any) -> bool:
        return isinstance(side, Symbol | AppliedUndef) and not (other.free_symbols & side.free_symbols)

    return all(
        (lone(link.lhs, link.rhs) or lone(link.rhs, link.lhs) or lone(-link.lhs, link.rhs) or lone(-link.rhs, link.lhs))
        and not (isinstance(link, Eq) and link.lhs.free_symbols and link.rhs.free_symbols)
        for link in relations(value)
    )


def sound(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Return math-verify's comparison of two relations, for those that have a solution."""
    from sympy.core.relational import Relational

    def compared(gold: Any, answer: Any, *precision: int) -> bool:
        both = isinstance(gold, Relational) and isinstance(answer, Relational)
        if both and _is_constant(gold):  # it holds for all values, or for none: a solution is missing
            return answer in (gold, gold.reversed)
        return compare(gold, answer, *precision)

    return compared


def _is_constant(relation: Any) -> bool:
    """Return True if the difference of the sides is the same wherever it is tried."""
    from sympy import Rational

    symbols = sorted(relation.free_symbols, key=str)
    if not symbols:
        return True
    try:
        difference = exact(relation.lhs) - exact(relation.rhs)
        tried = [
            difference.subs({name: Rational(point + 2 * place, 11) for place, name in enumerate(symbols)})
            for point in (3, 8, 16)
        ]
        return all(is_zero(value - tried[0]) for value in tried[1:])
    except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError):  # sets, matrices, functions
        return False


def sound_solutions(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Return math-verify's comparison of two equations by their solutions, for those that have some."""
    from sympy import Eq, simplify, solve

    def compared(gold: Any, answer: Any, *precision: int) -> bool:
        if is_solved(gold) and not is_solved(answer):
            return False
        if isinstance(gold, Eq) and isinstance(answer, Eq):
            names, others = ({symbol.name.casefold() for symbol in side.free_symbols} for side in (gold, answer))
            if names != others:
                return False
            if not solve(gold, gold.free_symbols):
                ratio = simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
                return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
        return compare(gold, answer, *precision)

    return compared


# --- comparing --------------------------------------------------------------------------------------------------------

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
        links = list(relations(value))
        if read_number(gold) is not None and not is_written_out(links[-1].rhs if links else value):
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
            from sympy import Rational

            return Rational(number.value.numerator, number.value.denominator)
        if _LOST_SUBSCRIPT.search(readable(one_spelling(gold))):
            return None
        expected = value_of(_parse(gold), gold)
        if getattr(expected, "is_number", False):
            exact(expected)  # every comparison does, so that a number that takes too long is the label's fault
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
    return ascending(found[0]) if found else None


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """Return math-verify's grader, whose comparisons are replaced where they err: they are called for parts too."""
    from math_verify import grader

    grader.sympy_compare_relational = sound(grader.sympy_compare_relational)
    grader.sympy_solve_and_compare = sound_solutions(grader.sympy_solve_and_compare)
    grader.sympy_numeric_eq = sound_numbers(grader.sympy_numeric_eq)
    compare = grader.sympy_symbolic_eq
    grader.sympy_symbolic_eq = lambda gold, answer: compare(exact(gold), exact(answer))  # decimals are not rounded
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
    is_ordered = written == "tuple" or (len(names) == len(in_gold) and next(relations(value), None) is None)
    if expected == "list" and is_ordered and in_gold:
        gold = Tuple(*in_gold)
        in_answer = (value.start, value.end) if isinstance(value, Interval) else in_answer
        value = Tuple(*in_answer) if in_answer else value
    elif in_gold and not points and len(in_gold) != len(in_answer) and {written, expected} != {"set"}:
        return False
    if isinstance(gold, Set):
        if not all(is_solved(link) for link in relations(value) if not isinstance(link, Eq)):
            return False
        gold, value = union_of(gold, gold_text), union_of(value, one_spelling(answer))
    if "\\sqrt{-" in answer + gold_text and isinstance(gold, Expr) and isinstance(value, Expr):
        gold, value = (side.subs({name: I for name in side.free_symbols if name.name == "i"}) for side in (gold, value))
    return (
        _verify(gold, value, read_number(answer))
        and not _is_untrue(value, answer)
        and not _has_false_link(value, answer)
    )


def _is_untrue(value: Any, text: str) -> bool:
    """Return True if an equation in the value of a text never holds: neither with degrees as numbers nor as angles."""
    if not is_false(value, text):
        return False
    if (angles := in_radians(one_spelling(text))) == one_spelling(text):
        return True
    other = _parse(angles)
    return next(relations(other), None) is None or is_false(other, angles)


def _has_false_link(value: Any, answer: str) -> bool:
    """Return True if `a = b = c`, of which math-verify has read only `c`, has a link that never holds."""
    sides = _EQUALS.split(answer)
    if len(sides) < 3 or next(relations(value), None) is not None:
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
