"""Policies that take a short way from gold: one field of its object, a tool's reply as the answer, one wrong value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentenv.testing.audit.explore import MARKER
from agentenv.testing.audit.view import View
from agentenv.testing.tool_calls import calls_with_texts, ending_tools, right_calls
from agentenv.testing.world import commands_of

_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_PAIR = re.compile(r"^\s*[A-Za-z][\w ]{0,30}\s*[:=]\s*\S.*$", re.MULTILINE)
_TAKES_BACK = re.compile(r"\b(?:undo|revert|roll ?back|take back|unmake)\b", re.IGNORECASE)
_ID = re.compile(r"(?=\w*\d)[\w-]{3,}")
_FIELDS, _MIN_FIELDS = 3, 3
"""Fields that are said alone, and how many gold has at least."""
OTHER_TEXT = "other_text"
"""Variant of `paste` that says a fixed text: where it earns, the end of the episode is all that counts."""
_TURNS = 6
"""The first actions of gold that are taken back, or said with a wrong value, each by a policy."""


# --- one field of several ---------------------------------------------------------------------------------------------


def _field(place: int, view: View) -> str | None:
    """Return gold with only one of the fields of its object, or of its lines of a key and a value."""
    gold = view.gold or ""
    whole = _OBJECT.search(gold)
    if view.before or "<tool_call>" in gold:
        return None
    if whole is None:
        lines = _PAIR.findall(gold)
        return lines[place].strip() if place < len(lines) >= _MIN_FIELDS else None
    values = _object(whole[0])
    if not place < len(values) >= _MIN_FIELDS:
        return None
    key, value = [*values.items()][place]
    return f"{gold[: whole.start()]}{json.dumps({key: value}, ensure_ascii=False)}{gold[whole.end() :]}"


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


# --- a reply as the answer --------------------------------------------------------------------------------------------


def _paste(view: View, what: str) -> str | None:
    """Return the calls of gold, and then the last reply, all of them, or another text in place of its answer."""
    if view.gold is None or (not view.before and "<tool_call>" not in view.gold):
        return None
    ends = [tool for tool in ending_tools(view.tools) if f'"{tool.get("function", tool).get("name")}"' in view.gold]
    if "<tool_call>" in view.gold and not ends:
        return view.gold
    replies = {"reply": "".join(view.seen[-1:]), "replies": "\n".join(view.seen), OTHER_TEXT: MARKER}
    reply = replies[what]
    calls = calls_with_texts(ends, lambda _: reply) if ends else {}
    return next(iter(calls.values()), reply) or None


# --- taken back, and done again ---------------------------------------------------------------------------------------


def _taking_back(view: View) -> str | None:
    """Return the command or the call that takes an action back; None without one."""
    tools = [tool for tool in view.tools if _TAKES_BACK.search(_name(tool).replace("_", " "))]
    said = [each for each in commands_of(view.prompt) if _TAKES_BACK.fullmatch(each)]
    return next(iter([*right_calls(tools).values(), *said, *_TAKES_BACK.findall(view.prompt)]), None)


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))


def _undo(turn: int, view: View) -> str | None:
    """Return gold up to a turn, and then take the action of that turn back and do it again, in turns."""
    num, back = len(view.before), _taking_back(view)
    if back is None or num <= turn:
        return view.gold if back is not None else None
    return back if (num - turn) % 2 else view.before[turn]


# --- one wrong value --------------------------------------------------------------------------------------------------


def slipped(gold: str) -> tuple[str, str] | None:
    """Return a call with one character of its last id or number changed, and that value; None without one."""
    whole = _OBJECT.search(gold)
    arguments = _object(whole[0]).get("arguments") if whole is not None else None
    if whole is None or not isinstance(arguments, dict):
        return None
    for key, value in reversed(arguments.items()):
        if isinstance(value, str) and _ID.fullmatch(value):
            last = value[-1]
            other = value[:-1] + (str((int(last) + 1) % 10) if last.isdecimal() else "B" if last == "A" else "A")
            changed = {**_object(whole[0]), "arguments": {**arguments, key: other}}
            text = json.dumps(changed, ensure_ascii=False)
            return f"{gold[: whole.start()]}{text}{gold[whole.end() :]}", value
    return None


def slip_of(actions: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of the first action that repeats a call with a wrong value, and the right one; None without."""
    wrong: dict[str, str] = {}
    for place, action in enumerate(actions):
        if action in wrong:
            return place, wrong[action]
        if (found := slipped(action)) is not None:
            wrong[found[0]] = found[1]
    return None


def _slip(place: int, view: View) -> str | None:
    """Return gold until it ends the task, then one of its calls with a wrong value, and from then on the end."""
    ends = right_calls(ending_tools(view.tools))
    if view.gold is None or not ends:
        return None
    if slip_of(view.before) is not None:
        return next(iter(ends.values()))
    if not any(f'"{name}"' in view.gold for name in ends):
        return view.gold
    calls = [found[0] for action in view.before if (found := slipped(action)) is not None]
    return calls[place] if place < len(calls) else None


def shortcut_policies() -> dict[str, dict[str, Callable[[View], str | None]]]:
    """Return the policies by name and variant."""
    return {
        "part": {f"field_{place + 1}": partial(_field, place) for place in range(_FIELDS)},
        "paste": {what: partial(_paste, what=what) for what in ("reply", "replies", OTHER_TEXT)},
        "undo": {f"turn_{turn + 1}": partial(_undo, turn) for turn in range(_TURNS)},
        "slip": {f"call_{place + 1}": partial(_slip, place) for place in range(_TURNS)},
    }
