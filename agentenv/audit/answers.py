r"""Answers in texts: what of a label or of gold a policy could say, and whether a text has it.

A short answer stands in many texts by chance: "2" in "2 attempts left". So a `Needle` is strong or weak. A strong one
counts wherever it stands; a weak one only where many tasks' texts have their own answer and not each other's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.audit.policies import label_text

_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HASHES = re.compile(r"####\s*(.+)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_SEPARATED = re.compile(r"(?<=\d),(?=\d{3}\b)")
_STRONG_DIGITS, _STRONG_LETTERS, _LONGEST = 3, 6, 4000


@dataclass(frozen=True, slots=True)
class Needle:
    """An answer, normalised."""

    text: str
    strong: bool
    """Whether it is too long to stand somewhere by chance."""

    def within(self, text: str) -> bool:
        """Whether a normalised text has it, as a whole word or number."""
        at = text.find(self.text)
        while at >= 0:
            before, after = text[max(0, at - 2) : at], text[at + len(self.text) :][:2]
            if not _continues(before, self.text[0]) and not _goes_on(self.text[-1], after):
                return True
            at = text.find(self.text, at + 1)
        return False


def normal(text: str) -> str:
    """Letters in lower case and of one width, digits of one script, numbers without separators, spaces as one."""
    text = unicodedata.normalize("NFKC", text).casefold()
    if not text.isascii():
        text = "".join(str(unicodedata.digit(char, char)) for char in text)
    return " ".join(_SEPARATED.sub("", text).split())


def needles(label: Any, gold: str | None) -> list[Needle]:
    """The answers that a label and a gold action have; none for labels that are rules, tests or schemas."""
    texts = [label_text(label)] if not isinstance(label, Mapping) else []
    if isinstance(label, Sequence) and not isinstance(label, str):
        texts = [label_text(each) for each in label]
    found = [_bare(text) for text in texts if text]
    if gold:
        found += [_bare(gold)] if not found or len(gold) >= 40 else []
    return list({needle.text: needle for text in found if (needle := _needle(text)) is not None}.values())


def _bare(text: str) -> str:
    """The answer in its usual wrappings."""
    for pattern in (_BOXED, _HASHES, _TAGGED):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip().strip("$")
    return text.strip().strip("$")


def _needle(text: str) -> Needle | None:
    text = normal(text[:_LONGEST])
    if not text:
        return None
    if _NUMBER.fullmatch(text):
        return Needle(text.lstrip("+"), len(re.sub(r"\D", "", text)) >= _STRONG_DIGITS)
    return Needle(text, sum(char.isalnum() for char in text) >= _STRONG_LETTERS)


def _continues(before: str, first: str) -> bool:
    """Whether what stands before belongs to the same word or number."""
    if not before or not (first.isalnum() or first == "-"):
        return False
    if before[-1] == "-":
        return first.isdigit() and not before[:-1].isalnum()  # a sign; in 1-15 it is none
    return before[-1].isalnum() or before[-1] == "_" or (before[-1] == "." and before[:-1].isdigit())


def _goes_on(last: str, after: str) -> bool:
    """Whether what stands after belongs to the same word or number."""
    if not after or not last.isalnum():
        return False
    return after[0].isalnum() or after[0] == "_" or (after[0] == "." and after[1:].isdigit())
