"""Where a response's thinking ends and its answer begins, and the tokens that end a turn."""

from __future__ import annotations

import re

_END_REVERSED = re.compile(r"(?:\s|>[|｜][^<>|｜\s]{1,40}[|｜]<|>(?:s|soe|sob|dap|nrut_fo_dne|txet_fo_dne)/?<)++")
"""White space and special tokens, read from a text's end: from there one pass finds them all."""
_OPEN, _CLOSE = "<think>", "</think>"
_BOXED_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def final_text(text: str) -> str | None:
    """What stands behind the last `</think>`, without special tokens at its end; all of a text without thinking.

    None where a thought was begun and not ended: the answer in it is none that the response commits to.
    """
    final = text.rpartition(_CLOSE)[2]
    return None if _OPEN in final else without_special_tokens(final).strip()


def with_opened_thought(text: str, prompt: str) -> str:
    """The response, after the `<think>` that its prompt ends with, as some chat templates have it.

    Without it what a limit cut inside of the thought would pass for an answer. One that says it again has it once.
    """
    opened = prompt.rstrip().endswith(_OPEN) and not text.lstrip().startswith(_OPEN)
    return _OPEN + text if opened else text


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
    end = _END_REVERSED.match(text[::-1])
    return text[: len(text) - end.end()] if end else text


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
