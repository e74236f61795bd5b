r"""Compares answers by math-verify, in a worker process of `pool.py`, under its limits.

What math-verify 0.9 gets wrong and this repairs: factorials too small to tell apart, an irrational gold matched by a
decimal, `12.5%` against `12.5`, a gold `0.333` against `1/3`, anagrams of words, text behind the first number, `5 6`
read as a sum. What remains:
- accepted though different: variables in another case (`x` equals `X`), `a = 5` for a bare `5`, other units, values
  that differ by less than 1e-15 after cancellation;
- refused though equal: `e^{i\pi}` for `-1`, `2 to 1` for `2:1`, `1/3 \approx 0.33` for `1/3`, decimals for an
  irrational gold, times of day in another case, number words ("eighteen").
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from agentenv.rewards import _math_text as text
from agentenv.rewards._worker import DeadlineReached

_MATHEMATICAL = re.compile(r"[0-9\\^_=+*/<>{}|√π∞]")
_SEVERAL_NUMBERS = re.compile(r"(?<![_0-9.])[0-9.]+ +[0-9]")
_PARTLY_READ = re.compile(r"\\(?:approx|sim|simeq|to|rightarrow|Rightarrow|implies|ne|neq)\b|[≈→]|[0-9]\s*_")
_LATEX = (
    ("√(", "sqrt("),
    ("\\sqrt(", "sqrt("),
    ("**", "^"),
    ("%", "\\%"),
    ("·", "\\cdot "),
    ("\u00d7", "\\times "),
    ("÷", "\\div "),
    ("\\varnothing", "\\emptyset"),
)
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}")
_ALL_NUMBERS = re.compile(r"- ?\\infty ?< ?[A-Za-z] ?< ?\+?\\infty")
_ROOT = re.compile(r"√ ?(?:\{([^{}]*)\}|([0-9.]+|[A-Za-z]))")

Verdict = tuple[str, str]


def prepare(request: dict[str, Any]) -> None:
    """Imports and warms up what the first request would pay for."""
    _grade("x^2+1", ("1+x^2",))


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """The `outcome` and `detail` of a request's `answer` against its `golds`; see `_grade`."""
    outcome, detail = _grade(request["answer"], tuple(request["golds"]))
    return {"outcome": outcome, "detail": detail}


def _grade(answer: str, golds: tuple[str, ...]) -> Verdict:
    """The verdict on an answer: correct if any gold matches; wrong only if every gold could be compared.

    Outcomes are those of `Outcome`, and `label`: a gold that cannot be compared, said as a DataError says it.
    """
    ranking = ("correct", "label", "wrong", "parse_error")
    return min((_compare(answer, gold) for gold in golds), key=lambda verdict: ranking.index(verdict[0]))


def _compare(answer: str, gold: str) -> Verdict:
    plain = text.plain_verdict(answer, gold)
    if plain is not None:
        return ("correct" if plain else "wrong"), ""
    try:
        expected = _parse_gold(gold)
    except (DeadlineReached, MemoryError) as error:
        limit = str(error) if isinstance(error, DeadlineReached) else "the memory of a check"
        return "label", f"label: expected an answer that can be compared in {limit}, got {gold[:200]!r}. Correct it."
    if expected is None and not _looks_mathematical(gold):
        return "wrong", ""
    if expected is None:
        return "label", f"label: expected an answer that math-verify can read, got {gold[:200]!r}. Correct it."
    if reason := _unreadable(answer, words=text.read_number(gold) is None):
        return "parse_error", reason
    try:
        pred = _parse(answer)
        if pred is None:
            return "parse_error", "math-verify cannot read the answer as an expression"
        return ("correct" if _verify(expected, pred, text.read_number(answer)) else "wrong"), ""
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the gold compares with itself, so it is the answer that does not
        return "parse_error", f"the answer cannot be compared: {type(error).__name__}: {error}"[:500]


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> Any | None:
    """The sympy expression of a gold that can be compared (at least with itself), or None."""
    try:
        number = text.read_number(gold)
        if number is not None and number.places is None and not number.percent:
            return _rational(number.value)
        expected = _parse(gold)
        return expected if expected is not None and _verify(expected, expected, None) else None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, this gold cannot be used
        return None


def _rational(value: Fraction) -> Any:
    from sympy import Rational  # type: ignore[import-untyped]

    return Rational(value.numerator, value.denominator)


def _parse(answer: str) -> Any | None:
    """The sympy expression of the whole answer, or None.

    Only the LaTeX reader is used: math-verify's plain-expression reader takes a number out of the middle of a text.
    """
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        f"${_to_latex(answer)}$",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return found[0] if found else None


def _verify(gold: Any, pred: Any, number: text.Number | None) -> bool:
    from math_verify import verify

    options = {"strict": True, "allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    if _is_empty(gold) is not _is_empty(pred):  # math-verify takes `x < oo`, and any inequality of numbers, for empty
        return False
    if not verify(gold, pred, **options):
        return False
    if not getattr(gold, "is_number", False) or not getattr(pred, "is_number", False):
        return True
    if number is not None and number.places is not None and gold.doit().is_rational is False:
        return False
    return _same_magnitude(gold, pred)


def _is_empty(value: Any) -> bool:
    return bool(getattr(value, "is_empty", False))


def _same_magnitude(gold: Any, pred: Any) -> bool:
    """Rejects what is equal only because both are nearly zero, as `1/2004!` and `1/2006!` are to 15 decimals."""
    a, b = gold.evalf(20), pred.evalf(20)
    if not (a.is_Float and b.is_Float) or abs(a) > 1e-3:
        return True
    return bool(abs(a - b) <= abs(a) / 1000)


def _looks_mathematical(gold: str) -> bool:
    """Whether a gold that math-verify cannot read was meant for it: it holds a digit, a command or an operator."""
    return _MATHEMATICAL.search(gold) is not None


def _unreadable(answer: str, *, words: bool) -> str:
    """Why an answer must not be handed to math-verify, which would read a part of it; empty if it may.

    Words among mathematics are taken for products of variables, slowly: without `words` they are refused.
    """
    if text.is_text(answer) or (
        not words and any(not text.MATH_WORDS.fullmatch(word) for word in _WORD.findall(answer))
    ):
        return "words where a number or an expression is expected"
    if _SEVERAL_NUMBERS.search(answer):
        return "several numbers without an operator between them"
    if found := _PARTLY_READ.search(answer):
        return f"{found[0].strip()!r} is not part of an answer"
    return ""


def _to_latex(answer: str) -> str:
    """The answer as math-verify's LaTeX reader wants it."""
    answer = _ALL_NUMBERS.sub(r"(-\\infty,\\infty)", answer)
    answer = _ROOT.sub(r"\\sqrt{\1\2}", answer)
    for written, latex in _LATEX:
        answer = answer.replace(written, latex)
    return answer
