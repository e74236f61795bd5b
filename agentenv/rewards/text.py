"""Where a response's thinking ends and its answer begins, and the tokens that end a turn."""

from __future__ import annotations

import re

_SPECIAL_TOKEN = re.compile(r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|</?(?:s|eos|bos|pad|end_of_turn|end_of_text)>)$")
_OPEN, _CLOSE = "<think>", "</think>"
_BOXED_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def final_text(text: str) -> str | None:
    """What stands behind the last `</think>`, without special tokens at its end; all of a text without thinking.

    None where a thought was begun and not ended: the answer in it is none that the response commits to.
    """
    final = text.rpartition(_CLOSE)[2]
    return None if _OPEN in final else without_special_tokens(final).strip()


def thought_text(text: str) -> str:
    """The first thought, without its tags; empty where there is none.

    A thought may lack its beginning, which some chat templates put into the prompt, and its end, where a limit cut it.
    """
    before, closed, _ = text.partition(_CLOSE)
    head, opened, thought = before.partition(_OPEN)
    if opened:
        return thought.strip()
    return head.strip() if closed else ""


def without_special_tokens(text: str) -> str:
    """The text without white space and special tokens at its end, in any of the usual spellings."""
    end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        token = _SPECIAL_TOKEN.search(text, max(0, end - 60), end)
        if token is None:
            return text[:end]
        end -= len(token[0])


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{…}` with balanced braces and something in it holds, or None; linear in the text."""
    open_braces: list[int] = []  # content start of a box, -1 of any other group
    best: tuple[int, int] | None = None
    for token in _BOXED_TOKEN.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0 and (best is None or start > best[0]) and text[start : token.start()].strip():
                best = (start, token.start())
        elif token[0] == "{":
            open_braces.append(-1)
        elif token[0][-1] == "{" and len(token[0]) > 2:
            open_braces.append(token.end())
    return text[best[0] : best[1]] if best else None
