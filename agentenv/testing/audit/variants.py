"""Policies made from gold: all options in its place, parts repeated, a tool's reply as the answer, and undo."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentenv.testing.audit.explore import MARKER
from agentenv.testing.audit.view import View
from agentenv.testing.tool_calls import calls_with_texts, ending_tools, right_calls
from agentenv.testing.world import commands_of, options_of

REPEATS = 12
"""Number of times that a word or line is said in one action."""
LISTED = ("lines", "commas", "quoted", "as_a_list")
"""Ways to write several options where gold has one or some."""
OTHER_TEXT = "other_text"
"""Variant of `paste` that says a fixed text: where it earns, the end of the episode is all that counts."""
_ACTION_REPEATS = 5
_MAX_OPTIONS = 30
_TURNS = 6
"""The first actions of gold that are taken back, each by a policy."""
_WORD = re.compile(r"[^\W_][\w'-]*")
_NUMBERED = re.compile(r"^\s*(?:\d{1,2}[.):]|[-*\u2022]|\(?[A-Za-z][.)])\s+(\S.{0,78}?)\s*$", re.MULTILINE)
_LETTERED = re.compile(r"(?:^|\s)\(?([A-J])[.):]\s*\S", re.MULTILINE)
_COLON = re.compile(r": ([^\n:]+?)(?:[.;]|$)", re.MULTILINE)
_TAKES_BACK = re.compile(r"\b(?:undo|revert|roll ?back|take back|unmake)\b", re.IGNORECASE)

Act = Callable[[View], str | None]


def variant_policies() -> dict[str, dict[str, Act]]:
    """Return the policies by name and variant."""
    listed: dict[str, Act] = {}
    for how in LISTED:
        for name, back, others in ((how, False, False), (f"{how}_back", True, False), (f"{how}_others", False, True)):
            listed[name] = partial(_list, how, back, others)
    repeated: dict[str, Act] = {"action": _repeat_action}
    for name, num in (("once", 1), ("many", REPEATS)):
        repeated |= {f"word_{place + 1}_{name}": partial(_repeat_word, place, num) for place in range(2)}
        repeated |= {f"line_{name}": partial(_repeat_line, num), f"neutral_{name}": partial(_repeat_neutral, num)}
    return {
        "list_all": listed,
        "repeat": repeated,
        "paste": {what: partial(_paste, what=what) for what in ("reply", "replies", OTHER_TEXT)},
        "undo": {f"turn_{turn + 1}": partial(_undo, turn) for turn in range(_TURNS)},
    }


# --- all options ------------------------------------------------------------------------------------------------------


def option_lists(prompt: str) -> list[list[str]]:
    """Return the lists of options in a prompt: numbered or marked lines, letters before options, and enumerations."""
    letters = list(dict.fromkeys(_LETTERED.findall(prompt)))
    after_colon = [[part.strip() for part in text.split(", ")] for text in _COLON.findall(prompt) if ", " in text]
    found = [list(dict.fromkeys(_NUMBERED.findall(prompt))), letters, *after_colon, options_of(prompt)]
    return [own[:_MAX_OPTIONS] for own in found if len(own) > 1]


def listed(prompt: str, gold: str, how: str, *, back: bool = False, others: bool = False) -> str | None:
    """Return gold with all options in place of those that it has; None if it has no option, or all of a list.

    Args:
        prompt: the text with the options.
        gold: the right action.
        how: one of `LISTED`.
        back: whether to write the options in the opposite order.
        others: whether to leave out those of gold.
    """
    for options in option_lists(prompt):
        own = [option for option in options if _found(option, gold)]
        if not own or len(own) == len(options):
            continue
        said = [option for option in options if not (others and option in own)]
        return _written(gold, own, said[::-1] if back else said, how)
    return None


def _found(option: str, gold: str) -> list[re.Match[str]]:
    return [*re.finditer(rf"(?<!\w){re.escape(option)}(?!\w)", gold, re.IGNORECASE)]


def _written(gold: str, own: Sequence[str], said: Sequence[str], how: str) -> str | None:
    """Return gold with the options `said` in place of `own`."""
    places = [_found(option, gold)[-1] for option in own]
    start, end = min(place.start() for place in places), max(place.end() for place in places)
    if how == "lines":  # the form of the line with an option, once for each
        first = gold.rfind("\n", 0, start) + 1
        stop = gold.find("\n", end)
        stop = len(gold) if stop < 0 else stop
        line = gold[first:stop].partition("\n")[0]
        place = min(places, key=lambda each: each.start())
        form = line[: place.start() - first], line[place.end() - first :]
        return gold[:first] + "\n".join(f"{form[0]}{option}{form[1]}" for option in said) + gold[stop:]
    is_quoted = gold[start - 1 : start] == '"' and gold[end : end + 1] == '"'
    if how == "commas":
        return gold[:start] + ", ".join(said) + gold[end:]
    if not is_quoted:
        return None
    if how == "quoted":
        return gold[:start] + '", "'.join(said) + gold[end:]
    return gold[: start - 1] + "[" + ", ".join(f'"{option}"' for option in said) + "]" + gold[end + 1 :]


def _list(how: str, back: bool, others: bool, view: View) -> str | None:
    if view.gold is None:
        return None
    said = listed(view.prompt, view.gold, how, back=back, others=others)
    # Before the answer, gold may look something up.
    return view.gold if said is None and (view.turn_index or "<tool_call>" in view.gold) else said


# --- repeats ----------------------------------------------------------------------------------------------------------


def _key_words(view: View) -> list[str]:
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


def _repeat_word(place: int, num: int, view: View) -> str | None:
    if view.before:
        return view.before[0]
    words = _key_words(view)
    return " ".join([words[place]] * num) if place < len(words) else None


def _repeat_neutral(num: int, view: View) -> str | None:
    return " ".join(["something"] * num) if _key_words(view) else None


def _repeat_line(num: int, view: View) -> str | None:
    if view.before:
        return view.before[0]
    lines = [line for line in (view.gold or "").splitlines() if line.strip()]
    return "\n".join([lines[0]] * num) if len(set(lines)) > 1 and "<tool_call>" not in lines[0] else None


def _repeat_action(view: View) -> str | None:
    return None if view.gold is None else "\n".join([view.gold] * _ACTION_REPEATS)


# --- a reply as the answer, and actions that are taken back -----------------------------------------------------------


def _paste(view: View, what: str) -> str | None:
    """Return the calls of gold, and then the last reply, all of them, or another text in place of its answer."""
    if view.gold is None or (not view.before and "<tool_call>" not in view.gold):
        return None
    ends = [tool for tool in ending_tools(view.tools) if f'"{_name(tool)}"' in view.gold]
    if "<tool_call>" in view.gold and not ends:
        return view.gold
    replies = {"reply": "".join(view.seen[-1:]), "replies": "\n".join(view.seen), OTHER_TEXT: MARKER}
    calls = calls_with_texts(ends, lambda _: replies[what]) if ends else {}
    return next(iter(calls.values()), replies[what]) or None


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
