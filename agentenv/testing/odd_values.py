"""Numbers and JSON that parsers seldom expect, alone and in place of the values in a right action."""

from __future__ import annotations

import json
import re
from typing import Any

ODD_NUMBERS = ("\u00b2", "\u00b2 #### \u00b2", "\uff14\uff12")
"""A superscript, of which `isdigit` is true and which `int` refuses, alone and behind a mark; fullwidth digits."""
ODD_JSON = ("[]", "0", "null", '"x"', "```json\n[]\n```", "```json\nnull\n```")
"""JSON that is not an object, alone and in a fence."""
ODD_FLOATS = ("nan", "inf", "-inf", "1e999")
"""Numbers that comparisons with a bound seldom expect."""
ODD_FORMS = (
    "digit", "nan", "infinite", "no_value", "null_values", "number_values", "list_values", "no_keys", "not_an_object",
)  # fmt: skip
"""Names of what `odd_forms` returns at most."""
_VALUE = re.compile(r"(?<![\d.])\d+(?:\.\d+)?(?!.*\d)", re.DOTALL)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_PATTERN = re.compile(r"[^\s`'\"/]*(?:\\[dwsbDWSB]|\[[^\]\s]+\]|\.[*+])[^\s`'\"/]*")
_BACKTRACKS = "(.+)+@@"
"""A regular expression whose search takes time that is exponential in the length of most texts."""


def odd_forms(gold: str) -> dict[str, str]:
    """Return a right action with odd values: of its last number, and of each JSON object."""
    forms: dict[str, str] = {}
    found = _VALUE.search(gold)
    if found is not None:
        before, after = gold[: found.start()], gold[found.end() :]
        values = {"digit": "\u00b2", "nan": "nan", "infinite": "73914e999", "no_value": ""}
        forms = {name: f"{before}{value}{after}" for name, value in values.items()}
    whole = _OBJECT.search(gold)
    try:
        parsed: Any = json.loads(whole[0]) if whole is not None else None
    except (ValueError, RecursionError):
        parsed = None
    if whole is None or not isinstance(parsed, dict):
        return forms
    arguments = parsed.get("arguments")
    is_call = isinstance(arguments, dict)
    inner: dict[str, Any] = arguments if isinstance(arguments, dict) else parsed
    odd = {
        "null_values": dict.fromkeys(inner),
        "number_values": dict.fromkeys(inner, 7),
        "list_values": {key: ["x"] for key in inner},
        "no_keys": {},
        "not_an_object": [],
    }
    for name, value in odd.items():
        text = json.dumps({**parsed, "arguments": value} if is_call else value)
        forms[name] = f"{gold[: whole.start()]}{text}{gold[whole.end() :]}"
    return forms


def slow_pattern(gold: str) -> str | None:
    """Return a right action with a slow regular expression in place of its last one; None if it has none."""
    found = [*_PATTERN.finditer(gold)]
    if not found:
        return None
    return f"{gold[: found[-1].start()]}{_BACKTRACKS}{gold[found[-1].end() :]}"
