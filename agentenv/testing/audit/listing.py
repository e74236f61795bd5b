"""Policies that say all options of a prompt in place of the right ones, in the form of gold."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from agentenv.testing.audit.view import View
from agentenv.testing.world import options_of

_NUMBERED = re.compile(r"^\s*(?:\d{1,2}[.):]|[-*\u2022]|\(?[A-Za-z][.)])\s+(\S.{0,78}?)\s*$", re.MULTILINE)
_LETTERED = re.compile(r"(?:^|\s)\(?([A-J])[.):]\s*\S", re.MULTILINE)
_COLON = re.compile(r": ([^\n:]+?)(?:[.;]|$)", re.MULTILINE)
_MAX_OPTIONS = 30
LISTED = ("lines", "commas", "quoted", "as_a_list")
"""Ways to write several options where gold has one or some."""


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
        line_end = gold.find("\n", start, stop)
        line = gold[first : stop if line_end < 0 else line_end]
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


def _act(how: str, back: bool, others: bool, view: View) -> str | None:
    if view.gold is None:
        return None
    said = listed(view.prompt, view.gold, how, back=back, others=others)
    # Before the answer, gold may look something up.
    return view.gold if said is None and (view.turn_index or "<tool_call>" in view.gold) else said


def listing_policies() -> dict[str, Callable[[View], str | None]]:
    """Return the policies by variant: each way in both orders, and without the options of gold."""
    found: dict[str, Callable[[View], str | None]] = {}
    for how in LISTED:
        for name, back, others in ((how, False, False), (f"{how}_back", True, False), (f"{how}_others", False, True)):
            found[name] = partial(_act, how, back, others)
    return found
