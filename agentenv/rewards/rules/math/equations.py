r"""What equations and inequalities say, where math-verify is mistaken.

It takes the last side of an answer for its value, so that `8 = 7` was right for 7. It compares two equations by their
solutions, so that any two without a solution were equal, and `2x = 6`, which a task may begin with, was right for
`x = 3`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from agentenv.rewards.rules.math.values import exact, is_zero

_TOLERANCE = 1e-9
_ROUNDED = 0.01
"""The tolerance where decimals are part of a side, relative to the value."""
_IN_BASE = re.compile(r"n_\{([0-9]+)x([0-9a-z]+)\}")
_DECIMAL = re.compile(r"[0-9]*\.([0-9]+)")


def relations(value: Any) -> Iterator[Any]:
    """Yield the equations and inequalities in a value: in chains, sets and tuples too."""
    from sympy import And, FiniteSet, Tuple  # type: ignore[import-untyped]
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
        if not (isinstance(gold, Relational) and isinstance(answer, Relational)):
            return compare(gold, answer, *precision)
        if _is_constant(gold):  # it holds for all values, or for none: a solution is missing
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
            if _names(gold) != _names(answer):
                return False
            if not solve(gold, gold.free_symbols):
                ratio = simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
                return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
        return compare(gold, answer, *precision)

    return compared


def _names(equation: Any) -> set[str]:
    return {symbol.name.casefold() for symbol in equation.free_symbols}
