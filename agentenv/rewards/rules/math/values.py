r"""Compare values exactly: nothing is zero because it is small, as math-verify's terms below 1e-15 are.

To it, `\frac{2^{100}-1}{2^{100}}` equals `10^{-30}`, and `x > 10^{-20}` is `x > 10^{-30}`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from agentenv.rewards.rules.math.answers import Number, numbers_equal

_MAX_DIGITS = 500
"""Precision to which an irrational value that seems to be zero is computed."""


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
    return all(rest.is_zero or _is_zero_number(Add(*found)) for rest, found in coefficients.items())


def _is_zero_number(value: Any) -> bool:
    if value.is_Rational:
        return bool(value == 0)
    parts = value.evalf(2, maxn=_MAX_DIGITS).as_real_imag()
    return all(part == 0 or (part.is_Float and part._prec == 1) for part in parts)  # 1 means: no digit is certain


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


def sound_symbols(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Return math-verify's comparison of expressions by simplification, without the rounding of decimals."""

    def compared(gold: Any, answer: Any) -> bool:
        return compare(exact(gold), exact(answer))

    return compared


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
