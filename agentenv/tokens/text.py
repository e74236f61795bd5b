"""The text of each token of a sequence (`token_texts`), and text with what cannot be seen made visible (`visible`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from agentenv.agent import Tokenizer

_BROKEN = "\ufffd"
_MAX_PENDING = 8
"""Tokens that may wait for the rest of a character; a character has at most four bytes."""
_PENDING = "⋯"


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """[T] The text of each token, so that joined they are the decoded text, but for a space that decoding drops first.

    Bytes of a character that several tokens share give it to the token that completes it, and nothing to the others.
    Bytes that are no character are U+FFFD; characters beside them stay, which decoders of byte tokens may spoil too.
    """
    options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    anchor = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
    before = str(tokenizer.decode(anchor, **options)) if anchor else ""

    def following(new: Sequence[int]) -> str:
        """The text of ids that continue a sequence: at its beginning a tokenizer may drop a space."""
        return str(tokenizer.decode([*anchor, *new], **options)).removeprefix(before)

    table = {token: following([token]) for token in set(ids)}
    texts, run = [], list[int]()
    for token in ids:
        if _BROKEN in table[token]:
            run.append(token)
            continue
        if run:
            texts += _shared_bytes(following, run)
            run = []
        texts.append(table[token])
    return texts + _shared_bytes(following, run)


def _shared_bytes(following: Callable[[Sequence[int]], str], run: Sequence[int]) -> list[str]:
    """The texts of neighbouring tokens that are parts of characters, or no text at all."""
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


class TokenText:
    """A sequence of token ids with its text: from tokens to characters and back."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        texts = token_texts(tokenizer, self.ids)
        self.whole = "".join(texts)
        self.starts = [0, *accumulate(map(len, texts))]
        """Offset at which each token begins, and the end."""

    def text(self, start: int, end: int) -> str:
        """Of tokens [start, end)."""
        return self.whole[self.starts[start] : self.starts[end]]

    def at(self, offset: int) -> int:
        """The last token that begins at an offset or before it."""
        return bisect_right(self.starts, offset) - 1

    def cuts(self, offset: int, size: int) -> set[int]:
        """Where in `size` characters from an offset on a token begins or the last one ends, from the offset."""
        first, last = self.at(offset), self.at(offset + size)
        return {start - offset for start in self.starts[first : last + 1] if start >= offset}


def visible(text: str) -> str:
    """A token's text for people: ↵ before a newline, · for the spaces it begins with, ⋯ for no text, rest `escaped`."""
    if not text:
        return _PENDING
    body = text.lstrip(" ")
    return "·" * (len(text) - len(body)) + escaped(body).replace("\n", "↵\n")


def escaped(text: str) -> str:
    """Text that cannot steer a terminal: ⇥ for a tab, control and direction characters by number; newlines stay."""
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character == "\t":
        return "⇥"
    return character if character.isprintable() or character == "\n" else f"\\u{{{ord(character):x}}}"
