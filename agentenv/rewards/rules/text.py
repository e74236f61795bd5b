"""Split a response into thinking and answer, and remove the tokens that end a turn."""

from __future__ import annotations

import re
from typing import NamedTuple

_END_REVERSED = re.compile(r"(?:\s|>[|｜][^<>|｜\s]{1,40}[|｜]<|>(?:s|soe|sob|dap|nrut_fo_dne|txet_fo_dne)/?<)++")
"""White space and special tokens, matched from the reversed text's start in one pass."""
_INVISIBLE = frozenset(
    map(
        chr,
        (0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x180E), 0x180F, 0x2800, 0x3164, 0xFFA0,
         *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)),
    )
)  # fmt: skip
"""Fillers, joiners, variation selectors and a blank, which Python takes for printable."""
FONTS = (
    r"(?:bf|it|rm|sf|tt|sc|em|bfseries|itshape|(?:display|text|script)style|tiny|scriptsize|footnotesize|small"
    r"|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])"
)
"""Pattern of LaTeX's commands, without the backslash, that change the font of what follows."""
INK = re.compile(r"\\(?:(?:text)?color ?(?:\[[A-Za-z]{1,8}\] ?)?|(?:tag\*?|label) ?)\{[^{}]{0,60}\}")
"""Colors, and the names of equations, in LaTeX."""
_OPEN, _CLOSE = "<think>", "</think>"
_BOXED_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def final_text(text: str) -> str | None:
    """Return the text after the last `</think>`, or all of it, without special tokens at its end.

    None for unfinished thinking: the response does not commit to an answer in it.
    """
    final = text.rpartition(_CLOSE)[2]
    return None if _OPEN in final else without_special_tokens(final).strip()


def with_opened_thought(text: str, prompt: str) -> str:
    """Return the response with the `<think>` that its prompt ends with, as in some chat templates; at most once.

    Without it, thinking that a limit cut off would pass for an answer.
    """
    opened = prompt.rstrip().endswith(_OPEN) and not text.lstrip().startswith(_OPEN)
    return _OPEN + text if opened else text


def thought_text(text: str) -> str:
    """Return the first thought, without its tags; empty if there is none.

    It may lack its opening tag, which some chat templates put into the prompt, and its closing tag, if a limit cut it.
    """
    before, closed, _ = text.partition(_CLOSE)
    head, opened, thought = before.partition(_OPEN)
    if opened:
        return thought.strip()
    return head.strip() if closed else ""


def is_blank(text: str) -> bool:
    """Return True if a text has nothing to see: no characters, or only white space and zero-width ones."""
    return all(char.isspace() or not char.isprintable() or char in _INVISIBLE for char in text)


def without_special_tokens(text: str) -> str:
    """Return the text without white space and special tokens, in the usual spellings, at its end."""
    end = _END_REVERSED.match(text[::-1])
    return text[: len(text) - end.end()] if end else text


class BoxSpan(NamedTuple):
    r"""Where a `\boxed{…}` begins, and where its content does and ends."""

    start: int
    content: int
    end: int


def boxes(text: str) -> list[BoxSpan]:
    r"""Return every nonempty `\boxed{…}` with balanced braces, in the order of their starts; linear in the text."""
    open_braces: list[tuple[int, int] | None] = []  # None for any other group
    found: list[BoxSpan] = []
    for token in _BOXED_TOKEN.finditer(text):
        if token[0] == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None and text[opened[1] : token.start()].strip():
                found.append(BoxSpan(*opened, token.start()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0][-1] == "{" and len(token[0]) > 2:
            open_braces.append(token.span())
    found.sort()
    return found


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last nonempty `\boxed{…}` with balanced braces, or None."""
    found = boxes(text)
    return text[found[-1].content : found[-1].end] if found else None
