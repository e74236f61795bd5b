r"""What values, equations and inequalities say, where math-verify is mistaken.

To it, small terms are zero: `\frac{2^{100}-1}{2^{100}}` equals `10^{-30}`, and `x > 10^{-20}` is `x > 10^{-30}`. It
takes the last side of an answer for its value, so that `8 = 7` was right for 7. It compares two equations by their
solutions, so that any two without a solution were equal, and `2x = 6`, which a task may begin with, was right for
`x = 3`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from agentenv.rewards.rules.math.answers import Number, numbers_equal

_MAX_DIGITS = 500
"""Precision to which an irrational value that seems to be zero is computed."""
_TOLERANCE = 1e-9
_ROUNDED = 0.01
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
    return _ROUNDED * scale


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
