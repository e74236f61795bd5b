"""Policies made from gold: parts of it repeated, its objects with other values, and notations that mean the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentenv.testing.audit.view import View

REPEATS = 12
"""Number of times that a word or line is said in one action."""
_ACTION_REPEATS = 5
_WORD = re.compile(r"[^\W_][\w'-]*")
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_PAIR = re.compile(r"^(\s*[A-Za-z][\w ]{0,30}\s*[:=]\s*)(\S.*)$", re.MULTILINE)
_ATTEMPT = re.compile(r"submit|answer|guess|check|verify|validate|grade|attempt|propose|solve|finish|report", re.I)
_NEAR = 60
_STRONG = 4
"""Minimum number of letters and digits of a value that does not occur in a text by chance."""
_WRONG = "zzz"


# --- repeats ----------------------------------------------------------------------------------------------------------


def key_words(view: View) -> list[str]:
    """Return words that gold has once: those of a list as the label, else its longest."""
    if view.gold is None or "<tool_call>" in view.gold or "{" in view.gold:
        return []
    words = _WORD.findall(view.gold)
    single = [word for word in dict.fromkeys(words) if words.count(word) == 1]
    if isinstance(view.label, list):
        listed = [str(each) for each in view.label if isinstance(each, str | int)]
        own = [word for word in listed if word.lower() in [each.lower() for each in single]]
    else:
        own = sorted(single, key=len, reverse=True) if len(single) > 1 else []
    return own[:2]


def _said(place: int, num: int, view: View) -> str | None:
    if view.before:
        return view.before[0]
    words = key_words(view)
    return " ".join([words[place]] * num) if place < len(words) else None


def _neutral(num: int, view: View) -> str | None:
    return " ".join(["something"] * num) if key_words(view) else None


def _line(num: int, view: View) -> str | None:
    if view.before:
        return view.before[0]
    lines = [line for line in (view.gold or "").splitlines() if line.strip()]
    return "\n".join([lines[0]] * num) if len(set(lines)) > 1 and "<tool_call>" not in lines[0] else None


def _action(view: View) -> str | None:
    return None if view.gold is None else "\n".join([view.gold] * _ACTION_REPEATS)


def repeating_policies() -> dict[str, Callable[[View], str | None]]:
    """Return the policies by variant: a word or line once and many times, and each action of gold many times."""
    found: dict[str, Callable[[View], str | None]] = {"action": _action}
    for name, num in (("once", 1), ("many", REPEATS)):
        found |= {f"word_{place + 1}_{name}": partial(_said, place, num) for place in range(2)}
        found |= {f"line_{name}": partial(_line, num), f"neutral_{name}": partial(_neutral, num)}
    return found


# --- objects with other values ----------------------------------------------------------------------------------------


def _changed(value: Any, keep: Callable[[str, Any], bool], key: str = "") -> Any:
    """Return an object with each value replaced by a wrong one of its type, except for those to keep."""
    if isinstance(value, Mapping):
        return {name: _changed(part, keep, str(name)) for name, part in value.items()}
    if isinstance(value, list):
        return [_changed(part, keep, key) for part in value]
    if value is None or keep(key, value):
        return value
    if isinstance(value, bool):
        return not value
    return value + 73_914 if isinstance(value, int | float) else _WRONG


def is_told(key: str, value: Any, said: str, prompt: str) -> bool:
    """Return True if a text says the value of a key, and does not quote the prompt."""
    text = str(value)
    for found in re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", said):
        before = said[max(0, found.start() - _NEAR) : found.start()]
        quoted = said[max(0, found.start() - 12) : found.end()]
        is_strong = sum(char.isalnum() for char in text) >= _STRONG
        if (is_strong or key.lower() in before.lower()) and quoted not in prompt:
            return True
    return False


def with_values(gold: str, keep: Callable[[str, Any], bool]) -> str | None:
    """Return gold with wrong values in its object or in its lines of a key and a value; None if it has neither."""
    whole = _OBJECT.search(gold)
    try:
        values: Any = json.loads(whole[0]) if whole is not None else None
    except (ValueError, RecursionError):
        values = None
    if whole is not None and isinstance(values, dict) and values:
        arguments = values.get("arguments")
        is_call = isinstance(arguments, dict)
        if is_call and not _ATTEMPT.search(str(values.get("name"))):
            return None
        changed = {**values, "arguments": _changed(arguments, keep)} if is_call else _changed(values, keep)
        return f"{gold[: whole.start()]}{json.dumps(changed, ensure_ascii=False)}{gold[whole.end() :]}"
    if len(_PAIR.findall(gold)) < 2:
        return None

    def other(found: re.Match[str]) -> str:
        return found[0] if keep(found[1].strip(" :=\t\n"), found[2].strip()) else f"{found[1]}{_WRONG}"

    return _PAIR.sub(other, gold)


def _shaped(view: View, *, fill: bool) -> str | None:
    if view.gold is None:
        return None
    said = "\n".join(view.seen) if fill else ""
    shaped = with_values(view.gold, lambda key, value: is_told(key, value, said, view.prompt))
    return view.gold if shaped is None and "<tool_call>" in view.gold else shaped


def shaped_policies() -> dict[str, Callable[[View], str | None]]:
    """Return the policies by variant: gold with wrong values, also with those that the feedback says."""
    return {"wrong_values": partial(_shaped, fill=False), "told_values": partial(_shaped, fill=True)}
