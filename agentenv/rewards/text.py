"""Where a response's thinking ends and its answer begins, and the tokens that end a turn."""

from __future__ import annotations

import re

_SPECIAL_TOKEN = re.compile(r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|</?(?:s|eos|bos|pad|end_of_turn|end_of_text)>)$")
_OPEN, _CLOSE = "<think>", "</think>"


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
