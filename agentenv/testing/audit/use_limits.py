"""Policies that use a tool or a command more often than the prompt or the tool's description allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentenv.testing.audit.view import View
from agentenv.testing.tool_calls import calls_with_world, ending_tools
from agentenv.testing.world import words_of

_NUMBERS = {
    "once": 1, "twice": 2, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10,
}  # fmt: skip
_NUMBER = rf"(\d{{1,2}}|{'|'.join(_NUMBERS)})"
_LIMIT = re.compile(
    rf"\b(?:at most|no more than|not more than|up to|maximum of|only|may|can|limited to|have)\b[^.;:\n]{{0,60}}?"
    rf"\b{_NUMBER}\b"
    rf"([^.;:\n]{{0,40}})|\b{_NUMBER}\b([^.;:?!\n]{{0,12}}?)\b(?:at most|maximum|in total)\b",
    re.IGNORECASE,
)
_USES = re.compile(
    r"(?:more )?(?:times|calls?|uses?|questions?|hints?|quer(?:y|ies)|search(?:es)?|lookups?|requests?|peeks?|looks?"
    r"|asks?|reads?|tests?|runs?|checks?)\b"
)
"""What may follow the number of a limit of use; others limit turns, attempts, words and the like."""
_SENTENCE = re.compile(r"[^.;?!\n]+(?:\.(?=\w)[^.;?!\n]*)*")
_COMMAND = re.compile(r"['\"`\u2018\u201c]?\b([A-Z]{3,}|(?<=['\"`])[a-z]{3,})( (?:[a-zA-Z]\b|<\w+>))?")
_MAX_LIMIT, EXTRA = 10, 3
"""Largest limit that is tried, and the number of uses beyond a limit."""
MAX_COMMANDS = 2


@dataclass(frozen=True, slots=True)
class UseLimit:
    """A limit of use that a text states."""

    name: str
    """Name of the tool, or the command."""
    most: int
    place: str = ""
    """What stands behind the command in place of an argument; empty for none, and for a tool."""
    is_tool: bool = False


def limits_of(prompt: str, tools: list[Mapping[str, Any]]) -> list[UseLimit]:
    """Return the limits of use that a prompt and the descriptions of tools state."""
    found: dict[str, UseLimit] = {}
    for tool in tools:
        function = tool.get("function", tool)
        name = str(function.get("name"))
        words = [word for word in name.lower().split("_") if len(word) > 2]
        own = [_most(sentence) for sentence in _SENTENCE.findall(str(function.get("description", "")))]
        said = [_most(each) for each in _SENTENCE.findall(prompt) if any(word in each.lower() for word in words)]
        most = next((number for number in [*own, *said] if number), 0)
        if most:
            found[name] = UseLimit(name, most, is_tool=True)
    before = ""
    for sentence in _SENTENCE.findall(prompt) if not tools else ():
        most = _most(sentence)
        if most:
            commands = _COMMAND.findall(sentence) or _COMMAND.findall(before)
            for name, place in commands[:1]:
                found.setdefault(name, UseLimit(name, most, place.strip()))
        before = sentence
    return [*found.values()][:MAX_COMMANDS]


def _most(sentence: str) -> int:
    """Return how often a sentence allows a use; 0 if it states no limit of use."""
    found = _LIMIT.search(sentence)
    if found is None:
        return 0
    number, noun = (found[1] or found[3]).lower(), (found[2] or found[4] or "").strip(" ,)").lower()
    is_use = number in ("once", "twice") or not noun or _USES.match(noun)
    most = _NUMBERS.get(number) or int(number)
    return most if is_use and most <= _MAX_LIMIT else 0


def uses(limit: UseLimit, view: View) -> list[str]:
    """Return actions that use the tool or command, different ones first; more than it allows."""
    num = limit.most + EXTRA
    if limit.is_tool:
        tools = [tool for tool in view.tools if tool.get("function", tool).get("name") == limit.name]
        calls = [*calls_with_world(tools, [view.prompt], each=num).values()]
    elif limit.place:
        said = [str(n) for n in range(1, num + 1)] if len(limit.place) == 1 else words_of(view.prompt)
        calls = [f"{limit.name} {each}" for each in said[:num]]
    else:
        calls = [limit.name]
    return [calls[index % len(calls)] for index in range(num)] if calls else []


def _act(place: int, view: View) -> str | None:
    offered = [tool for tool in view.tools if tool not in ending_tools(view.tools)]
    limits = limits_of(view.prompt, offered)
    if place >= len(limits):
        return None
    actions = uses(limits[place], view)
    return actions[view.turn_index] if view.turn_index < len(actions) else None


def limit_policies() -> dict[str, Callable[[View], str | None]]:
    """Return the policies by variant."""
    return {f"use_{place + 1}": partial(_act, place) for place in range(MAX_COMMANDS)}


def uses_beyond(most: int, observations: Sequence[str]) -> list[int]:
    """Return the places of the replies beyond a limit that say something; empty if they seem to refuse.

    A refusal says so, or says the same whatever the action is.

    Args:
        most: the number of uses that are allowed.
        observations: the reply to each use.
    """
    said = [
        index for index, text in enumerate(observations) if text.strip() and not _REFUSED.search(_COUNT.sub("", text))
    ]
    beyond = [index for index in said if index >= most]
    is_known = any(index < most for index in said)
    return beyond if is_known and len({observations[index] for index in beyond}) > 1 else []


_COUNT = re.compile(r"\b\d+(?: [\w]+){0,2} (?:left|remain\w*)|\b(?:left|remaining): ?\d+", re.IGNORECASE)
_REFUSED = re.compile(
    r"\b(?:no|not|none|cannot|can't|limit|left|already|used|enough|over|denied|refus\w*|exceed\w*|max\w*|error|sorry|"
    r"exhaust\w*|spent|unknown|invalid|allowed|wrong)\b",
    re.IGNORECASE,
)
"""Words of replies that refuse."""
