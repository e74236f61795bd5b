"""Reads the world of a task out of texts: names, keys, files, options, commands, and the form of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable

ALL_FORMS = "The answer is {0}.\n\\boxed{{{0}}}\n<answer>{0}</answer>\n#### {0}"
"""The usual forms of an answer, for a text that asks for none."""
_QUOTED = re.compile(r"(?<!\w)[\"'`\u201c\u2018]([^\"'`\n\u201c\u201d\u2018\u2019]{1,40})[\"'`\u201d\u2019](?!\w)")
_FILE = re.compile(r"\b[\w-]+\.[a-z]{1,5}\b|(?<!\w)/[\w./-]+\w")
_CODE = re.compile(r"\b(?:[A-Za-z]+[_-]?\d[\w-]*|\w+_\w+)\b")
_LISTED = re.compile(r"(?:[\w'-]+(?: \([^)]*\))?, )+(?:(?:or|and) )?[\w'-]+(?: \([^)]*\))?(?: (?:or|and) [\w'-]+)?")
_TWO = re.compile(r"\b([\w'-]+) or ([\w'-]+)\b")
_NAME = re.compile(r"(?<![.!?] )(?<!^)\b[A-Z][\w'-]+", re.MULTILINE)
_WORD = re.compile(r"[^\W_][\w'-]*")
_SHOUTED = re.compile(r"\b(?:[A-Z]+ ){0,2}[A-Z]{3,}(?: [A-Z]+){0,2}\b")
_TOLD = re.compile(r"\b(?:say|type|write|reply|answer|call|enter|send|with)\s+(?:the word )?([a-z]{2,12})\b")
_LABELED = re.compile(r"[\"'`\u2018\u201c]?\b([A-Z][A-Za-z]*(?: [A-Z][A-Za-z]*){0,3}:)(?=[\"'`\u2019\u201d\s<.]|$)")
_TAG = re.compile(r"<([a-z][\w-]{0,20})>")
_PLACE = re.compile(r": ?<([a-z][\w-]{0,20})>")
_STOP_WORDS = """
the and for with from that this you your are was were has have had not but its into one two what
which who how when where there then them they all any each use can may must their than only out per
new say answer call tool tools name number value text error question please give tell about does did
will would should could
"""
_STOP = frozenset(_STOP_WORDS.split())
_COMMAND_STOP = _STOP | frozenset(
    ["an", "in", "it", "of", "to", "is", "on", "at", "by", "be", "as", "my", "me", "yes", "no"]
)


def words_of(text: str, most: int = 40) -> list[str]:
    """Return the words of a text that a tool may know, best first: quoted, files, codes, listed, names, others."""
    found = [*_QUOTED.findall(text), *_FILE.findall(text), *_CODE.findall(text), *options_of(text)]
    found += [*_NAME.findall(text), *_WORD.findall(text)]
    kept = [word for word in found if word.strip() and word.lower() not in _STOP]
    return list(dict.fromkeys(kept))[:most]


def options_of(text: str) -> list[str]:
    """Return the members of the lists in a text, such as "salt, wool or iron"."""
    found = []
    for listed in _LISTED.findall(text):
        bare = re.sub(r" \([^)]*\)", "", listed)
        found += [part.strip() for part in re.split(r", (?:or |and )?| or | and ", bare)]
    found += [part for pair in _TWO.findall(text) for part in pair]
    return [part for part in dict.fromkeys(found) if part and part.lower() not in _STOP]


def keys_of(texts: Iterable[str], most: int = 8) -> list[str]:
    """Return the words that may be keys or files: quoted, files, codes, and listed."""
    found = [each for text in texts for each in (*_FILE.findall(text), *_CODE.findall(text), *options_of(text))]
    found += [each for text in texts for each in _QUOTED.findall(text)]
    return list(dict.fromkeys(found))[:most]


def commands_of(text: str) -> list[str]:
    """Return the actions that a text names: quoted ones, words in capitals, options, and what it says to write."""
    found = [*_QUOTED.findall(text), *_SHOUTED.findall(text), *_TOLD.findall(text), *options_of(text)]
    return [each for each in dict.fromkeys(found) if each.lower() not in _COMMAND_STOP]


def form_of(text: str) -> str | None:
    """Return the form of an answer that a text asks for, with {} in place of the answer; None without one."""
    places = [tag for tag in _PLACE.findall(text) if f"</{tag}>" not in text]  # "Answer: <number>" asks for no tag
    tags = [tag for tag in _TAG.findall(text) if tag != "think" and tag not in places]
    labels = _LABELED.findall(text)
    if tags:
        return f"<{tags[-1]}>{{}}</{tags[-1]}>"
    return f"{labels[-1]} {{}}" if labels else None
