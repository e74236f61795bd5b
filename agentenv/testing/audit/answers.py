r"""Finds answers in texts: the answers in a label or in gold, and whether a text contains one.

A short answer occurs in many texts by chance: "2" in "2 attempts left". So a `Needle` is strong or weak. A strong one
always counts; a weak one only if the texts of many tasks contain their own answer and not each other's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.rewards.rules.math.answers import plain_verdict
from agentenv.testing.audit.policies import fields_of, is_answer, label_text

_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HASHES = re.compile(r"####\s*(.+)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_SEPARATED = re.compile(r"(?<=\d),(?=\d{3}\b)")
_STRONG_DIGITS, _STRONG_LETTERS, _LONGEST = 3, 6, 4000


@dataclass(frozen=True, slots=True)
class Needle:
    """A normalized answer."""

    text: str
    strong: bool
    """Whether it is too long to occur by chance."""

    def within(self, text: str) -> bool:
        """Return True if a normalized text contains the answer as a whole word or number."""
        at = text.find(self.text)
        while at >= 0:
            before, after = text[max(0, at - 2) : at], text[at + len(self.text) :][:2]
            if not _continues_before(before, self.text[0]) and not _continues_after(self.text[-1], after):
                return True
            at = text.find(self.text, at + 1)
        return False


def normal(text: str) -> str:
    """Normalize case, width, digits and spaces of a text, and remove separators from numbers."""
    text = unicodedata.normalize("NFKC", text).casefold()
    if not text.isascii():
        text = "".join(str(unicodedata.digit(char, char)) for char in text)
    return " ".join(_SEPARATED.sub("", text).split())


def needles(label: Any, gold: Sequence[str] = ()) -> list[Needle]:
    """Return the answers in a label and in gold's actions; an empty list for labels such as rules, tests or schemas.

    A label that gold does not say, such as a key, is not an answer, and one move of many is not a secret. Of a label
    that is an object, those fields count with which gold ends: others may be the name of a function.
    """
    texts = [*fields_of(label).values()]
    if isinstance(label, Mapping):
        texts = [text for text in texts if gold and is_answer(gold[-1], text)]
    if isinstance(label, Sequence) and not isinstance(label, str):
        texts = [label_text(each) for each in label]
    found = [_bare(text) for text in texts if text]
    said = normal("\n".join(gold))
    is_said = any(needle.within(said) for needle in _needles(found))
    if gold and not is_said:  # but in another form, as 0.5 and 1/2
        found = [text for text in found if plain_verdict(_bare(gold[-1]), text)]
    if len({*gold}) == 1 and (not is_said or len(gold[0]) >= 40):
        found.append(_bare(gold[0]))
    return _needles(found)


def _needles(texts: Sequence[str]) -> list[Needle]:
    by_text = {}
    for text in map(normal, (text[:_LONGEST] for text in texts)):
        if not text:
            continue
        if _NUMBER.fullmatch(text):
            needle = Needle(text.lstrip("+"), len(re.sub(r"\D", "", text)) >= _STRONG_DIGITS)
        else:
            needle = Needle(text, sum(char.isalnum() for char in text) >= _STRONG_LETTERS)
        by_text[needle.text] = needle
    return list(by_text.values())


def _bare(text: str) -> str:
    """Return the answer inside a box, after ####, or in answer tags, or else the text."""
    for pattern in (_BOXED, _HASHES, _TAGGED):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip().strip("$")
    return text.strip().strip("$")


def _continues_before(before: str, first: str) -> bool:
    """Return True if the text before belongs to the same word or number."""
    if not before or not (first.isalnum() or first == "-"):
        return False
    if before[-1] == "-":
        return first.isdigit() and not before[:-1].isalnum()  # a sign; in 1-15 it is a dash
    return before[-1].isalnum() or before[-1] == "_" or (before[-1] == "." and before[:-1].isdigit())


def _continues_after(last: str, after: str) -> bool:
    """Return True if the text after belongs to the same word or number."""
    if not after or not last.isalnum():
        return False
    return after[0].isalnum() or after[0] == "_" or (after[0] == "." and after[1:].isdigit())
