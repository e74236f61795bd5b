"""The text of each token of a sequence (`token_texts`), and text with invisible characters made visible (`visible`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentenv.core.engine import Tokenizer

_BROKEN = "\ufffd"
_MAX_PENDING = 8
"""Maximum number of tokens that wait for the rest of a character: a character has at most four bytes."""
_PENDING = "⋯"


def token_texts(tokenizer: Tokenizer, ids: Sequence[int], table: dict[int, str] | None = None) -> list[str]:
    """Return the text of each of the T tokens; joined, they are the decoded text, plus any leading space it drops.

    If several tokens share the bytes of a character, the token that completes it gets the character, the others "".
    Bytes that are not a character become U+FFFD; adjacent characters are kept, which byte-token decoders may corrupt.
    `table` holds the texts of ids alone between calls with the same tokenizer; missing ones are added to it.
    """
    options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    anchor = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
    before = str(tokenizer.decode(anchor, **options)) if anchor else ""

    def following(new: Sequence[int]) -> str:
        return str(tokenizer.decode([*anchor, *new], **options)).removeprefix(before)

    table = {} if table is None else table
    table |= {token: following([token]) for token in set(ids) if token not in table}
    broken = {token for token in set(ids) if _BROKEN in table[token]}
    if not broken:
        return [table[token] for token in ids]
    texts, run = [], list[int]()
    for token in ids:
        if token in broken:
            run.append(token)
            continue
        if run:
            texts += _shared_bytes(following, run)
            run = []
        texts.append(table[token])
    return texts + _shared_bytes(following, run)


def _shared_bytes(following: Callable[[Sequence[int]], str], run: Sequence[int]) -> list[str]:
    """Return the texts of adjacent tokens that are parts of characters, or have no text at all."""
    texts: list[str] = []
    while len(texts) < len(run):
        start, done = len(texts), ""
        for end in range(start + 1, min(start + _MAX_PENDING, len(run)) + 1):
            whole = following(run[start:end])
            is_last = end in (len(run), start + _MAX_PENDING)
            sure = whole if is_last else whole.rstrip(_BROKEN)
            texts.append(sure[len(done) :])
            done = sure
            if sure == whole:
                break
    return texts


def visible(text: str) -> str:
    """Return a token's text for display: ↵ before a newline, · for leading spaces, ⋯ if empty, else as `escaped`."""
    if not text:
        return _PENDING
    body = text.lstrip(" ")
    return "·" * (len(text) - len(body)) + escaped(body).replace("\n", "↵\n")


def escaped(text: str) -> str:
    """Return text without terminal controls: ⇥ for a tab, control and direction characters by number; newlines stay."""
    return "".join(
        char if char.isprintable() or char == "\n" else f"\\u{{{ord(char):x}}}" for char in text.replace("\t", "⇥")
    )
