"""Numbers and JSON that parsers seldom expect, alone and in place of the values in a right action."""

from __future__ import annotations

import json
import re
from typing import Any

ODD_NUMBERS = ("\u00b2", "\u00b2 #### \u00b2", "\uff14\uff12")
"""A superscript, of which `isdigit` is true and which `int` refuses, alone and behind a mark; fullwidth digits."""
ODD_JSON = ("[]", "0", "null", '"x"', "```json\n[]\n```", "```json\nnull\n```")
"""JSON that is not an object, alone and in a fence."""
ODD_FORMS = ("digit", "no_value", "null_values", "number_values", "list_values", "no_keys", "not_an_object")
"""Names of what `odd_forms` returns at most."""
_VALUE = re.compile(r"\d+(?!.*\d)", re.DOTALL)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def odd_forms(gold: str) -> dict[str, str]:
    """Return a right action with odd values: of its last number, and of each JSON object."""
    forms = {}
    found = _VALUE.search(gold)
    if found is not None:
        before, after = gold[: found.start()], gold[found.end() :]
        forms = {"digit": f"{before}\u00b2{after}", "no_value": f"{before}{after}"}
    whole = _OBJECT.search(gold)
    try:
        values: Any = json.loads(whole[0]) if whole is not None else None
    except (ValueError, RecursionError):
        values = None
    if whole is None or not isinstance(values, dict):
        return forms
    arguments = values.get("arguments")
    is_call = isinstance(arguments, dict)
    inner: dict[str, Any] = arguments if isinstance(arguments, dict) else values
    odd = {
        "null_values": dict.fromkeys(inner),
        "number_values": dict.fromkeys(inner, 7),
        "list_values": {key: ["x"] for key in inner},
        "no_keys": {},
        "not_an_object": [],
    }
    for name, value in odd.items():
        text = json.dumps({**values, "arguments": value} if is_call else value)
        forms[name] = f"{gold[: whole.start()]}{text}{gold[whole.end() :]}"
    return forms
