"""Policies that say the right answer in another usual notation, which a grader should read, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from agentenv.testing.audit.view import View

_NUMBER = re.compile(r"(?<![\w.,])([-+\u2212]?)(\d[\d,]*)(\.\d+)?(?![\w]|[.,]\d)")
_LETTERS = re.compile(r"[^\W\d_]{3,}(?=\W*$)")
NOTATIONS = (
    "separators", "no_separators", "decimals", "plus", "unicode_minus", "spaces", "upper_case", "lower_case",
    "in_a_box", "in_dollars",
)  # fmt: skip
SEPARATED = re.compile(r"\d,\d{3}\b")


def in_notation(gold: str, label: object, how: str) -> str | None:
    """Return gold with its answer in another notation; None if the answer is not the label, or has no such notation.

    Args:
        gold: an action that ends with the answer.
        label: the label of the row.
        how: one of `NOTATIONS`.
    """
    found = [*_NUMBER.finditer(gold)]
    if found and _is_number(found[-1][0], label):
        sign, whole, rest = found[-1][1], found[-1][2], found[-1][3] or ""
        digits = whole.replace(",", "")
        made = {
            "separators": f"{sign}{int(digits):,}{rest}",
            "no_separators": f"{sign}{digits}{rest}",
            "decimals": f"{sign}{whole}{rest or '.'}0",
            "plus": f"+{whole}{rest}" if not sign else None,
            "unicode_minus": f"\u2212{whole}{rest}" if sign == "-" else None,
            "in_a_box": rf"\boxed{{{found[-1][0]}}}" if "\\boxed" not in gold else None,
            "in_dollars": f"${found[-1][0]}$" if "$" not in gold else None,
        }.get(how)
        if made is not None:
            return _different(gold, f"{gold[: found[-1].start()]}{made}{gold[found[-1].end() :]}")
    elif not str(label).strip() or str(label).strip().lower() not in gold.lower():
        return None
    word = _LETTERS.search(gold) if not found else None
    if word is not None and how in ("upper_case", "lower_case"):
        said = word[0].upper() if how == "upper_case" else word[0].lower()
        return _different(gold, f"{gold[: word.start()]}{said}{gold[word.end() :]}")
    return f" {gold} \n" if how == "spaces" else None


def _different(gold: str, said: str) -> str | None:
    return None if said == gold else said


def _is_number(text: str, label: object) -> bool:
    try:
        return float(text.replace(",", "").replace("\u2212", "-")) == float(str(label).replace(",", ""))
    except ValueError:
        return False


def _act(how: str, view: View) -> str | None:
    if view.gold is None or any("<tool_call>" not in action for action in view.before):
        return view.before[-1] if view.before else None
    return view.gold if "<tool_call>" in view.gold else in_notation(view.gold, view.label, how)


def notation_policies() -> dict[str, Callable[[View], str | None]]:
    """Return the policies by variant."""
    return {how: partial(_act, how) for how in NOTATIONS}
