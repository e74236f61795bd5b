"""Encode text depending on what precedes it and on who wrote it.

`Encoder.follow` encodes text that continues a sequence (without SentencePiece's leading space). `protect`, then
`follow` or `start` with the same mark, encode untrusted text so that it cannot forge an added token: a mark is inserted
after the first character of every added-token string in it, the rendering is split at the marks, and the pieces are
encoded separately. The decoded text stays the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentenv.chat.shipped_tokenizer import ShippedTokenizer
from agentenv.core.engine import Tokenizer

_ANCHORS = ("\ue000", "\n", ".", "a")
_WORDS = ("role", "type")
"""Keys whose values templates compare with fixed words."""
_NAMED = ("arguments", "properties")
"""Keys whose values are mappings with untrusted keys."""
_PRIVATE_USE = range(0xE001, 0xF8FF)
_MAX_UNDER_LOCK = 50_000
"""Characters that `encode` may take: unlike `encode_batch`, it blocks all other threads, for seconds per megabyte."""
_MAX_IDS_AT_ONCE = 100_000
"""Ids that are decoded in 0.01 s, in which no other thread runs."""
_MAX_AT_CUT = 64
"""Tokens by which the piece of a text may differ from its part in the whole, because it is cut off."""


class Encoder:
    """The added tokens of a tokenizer, and its two ways to encode: from the start, and as a continuation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._encode = tokenizer, encode_of(tokenizer)
        self.added, self.special_ids = _added_tokens(tokenizer)
        """Added tokens by text, and which of their ids are special."""
        self.added_ids = frozenset(self.added.values())
        # The tokenizer matches such a token in normalized text, where SentencePiece has replaced spaces with "▁".
        texts = [form for text in self.added for form in {text, text.replace("▁", " ")} if len(form) > 1]
        self._max_len = max(map(len, texts), default=0)
        self._texts = frozenset(texts)
        self._lengths = {text[0]: sorted({len(t) for t in texts if t[0] == text[0]}) for text in texts}
        firsts = "".join(map(re.escape, sorted(self._lengths)))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._heads = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self._tails = frozenset(text[-n:] for text in texts for n in range(1, len(text)))
        # Texts to put before a continuation; none if the tokenizer adds nothing before a text.
        self._anchors = [(anchor, list(self._encode(anchor, add_special_tokens=False))) for anchor in _ANCHORS]
        word = list(self._encode("word", add_special_tokens=False))
        for anchor, ids in self._anchors[:2]:
            if list(self._encode(anchor + "word", add_special_tokens=False)) == ids + word:
                self._anchors = []

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, 0 if unknown: a text has at least `len(text) / longest_token` tokens."""
        vocabulary: Mapping[str, int] = getattr(self._tokenizer, "get_vocab", dict)()
        return max(map(len, vocabulary), default=0)

    def start(self, text: str, mark: str = "", *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text that begins a sequence; with `mark`, of a rendering of protected messages."""
        pieces = self._pieces(text, mark)
        ids = list(self._encode(pieces[0], add_special_tokens=add_special_tokens)) if text else []
        return ids + [i for piece in pieces[1:] for i in self._after(piece)]

    def follow(self, text: str, mark: str = "") -> list[int]:
        """Return the ids of a text that continues a sequence; with `mark`, of a rendering of protected messages."""
        return [i for piece in self._pieces(text, mark) for i in self._after(piece)]

    def plain(self, text: str) -> list[int]:
        """Return ids that decode to the text and contain no added token, for a separate turn."""
        mark = self.free_mark([text])
        return self.follow(self.protect(text, mark), mark)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Return True if the beginning of a text has more tokens already; False if it has no more bytes."""
        least, size = 0, _MAX_UNDER_LOCK // 4
        may = len(text) > num_tokens or len(text.encode(errors="replace")) > num_tokens
        for start in range(0, len(text) - size if may else 0, size):
            least += len(self._encode(text[start : start + size], add_special_tokens=False)) - _MAX_AT_CUT
            if least > num_tokens:
                return True
        return False

    def free_mark(self, values: Sequence[Any]) -> str:
        """Return a character that occurs in none of the values, neither literally nor escaped."""
        seen = ascii(values)
        return next(chr(i) for i in _PRIVATE_USE if f"\\u{i:04x}" not in seen)

    def protect(self, value: Any, mark: str, *, ends: bool = False, named: bool = False) -> Any:
        """Return the value with `mark` after the first character of every added-token string in it, at any depth.

        With `ends`, also mark a string that, trimmed, begins or ends with part of an added-token string, which the
        template's text or another string may complete. Keys stay unchanged, except untrusted ones (`named`: the
        arguments of a call).
        """
        if isinstance(value, str):
            cuts = [start + 1 for start, _ in self._occurrences(value)]
            bare = value.strip()
            sizes = range(1, min(len(bare), self._max_len) + 1) if ends else ()
            if any(bare[:n] in self._tails for n in sizes):
                cuts.append(len(value) - len(value.lstrip()))
            if any(bare[-n:] in self._heads for n in sizes):
                cuts.append(len(value.rstrip()))
            cuts.sort()
            return mark.join(value[a:b] for a, b in zip([0, *cuts], [*cuts, len(value)], strict=True))
        if isinstance(value, Mapping):
            return {
                self.protect(key, mark, ends=ends and named): self.protect(
                    item, mark, ends=ends and key not in _WORDS, named=named or key in _NAMED
                )
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.protect(item, mark, ends=ends, named=named) for item in value]
        return value

    def unmarked(self, text: str, mark: str) -> str:
        """Return a rendering of protected messages without its marks, which JSON may have escaped."""
        return text.replace(f"\\u{ord(mark):04x}", mark).replace(mark, "")

    def _occurrences(self, text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield where each added-token string begins, and where the longest one there ends."""
        for found in self._first.finditer(text, start, len(text) if end is None else end):
            at = found.start()
            sizes = [n for n in self._lengths[found[0]] if text[at : at + n] in self._texts]
            if sizes:
                yield at, at + sizes[-1]

    def _pieces(self, text: str, mark: str) -> list[str]:
        """Split a rendering at the marks inside added-token strings; remove the other marks."""
        if not mark:
            return [text]
        parts = text.replace(f"\\u{ord(mark):04x}", mark).split(mark)
        whole, pieces, at = "".join(parts), [parts[0]], len(parts[0])
        for part in parts[1:]:
            spans = self._occurrences(whole, max(0, at - self._max_len), at)
            if any(end > at for _, end in spans):
                pieces.append(part)
            else:
                pieces[-1] += part
            at += len(part)
        return pieces

    def _after(self, text: str) -> list[int]:
        if not text:
            return []
        for anchor, ids in self._anchors:
            whole = list(self._encode(anchor + text, add_special_tokens=False))
            if whole[: len(ids)] == ids:
                return whole[len(ids) :]
        return list(self._encode(text, add_special_tokens=False))


def encode_of(tokenizer: Any) -> Callable[..., list[int]]:
    """Return `tokenizer.encode` without the overhead of tensors and batches for a single text."""
    if _backend(tokenizer, "encode", "_encode_plus", "_batch_encode_plus") is None:
        return tokenizer.encode  # type: ignore[no-any-return]

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        backend = tokenizer.backend_tokenizer
        if backend.truncation is not None or backend.padding is not None or backend.encode_special_tokens:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]
        if len(text) > _MAX_UNDER_LOCK:
            return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids  # type: ignore[no-any-return]
        return backend.encode(text, add_special_tokens=add_special_tokens).ids  # type: ignore[no-any-return]

    return encode


def decode_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return `tokenizer.decode` with special tokens kept, without the type check of every id."""
    backend = _backend(tokenizer, "decode", "_decode")
    if backend is None:
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if type(backend.decoder).__name__ == "ByteLevel":
        table = _TokenBytes(backend)

        def decode(ids: Sequence[int]) -> str:
            starts = range(0, len(ids), _MAX_IDS_AT_ONCE)
            parts = (b"".join(map(table.__getitem__, ids[at : at + _MAX_IDS_AT_ONCE])) for at in starts)
            return b"".join(parts).decode("utf-8", "replace")

        return decode
    return lambda ids: tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer by id, filled as ids are seen: a third of `decode`'s time."""

    def __init__(self, backend: Any) -> None:
        self._text_of = backend.id_to_token

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        if text is None:  # not stored: a token may be added under this id
            return b""
        try:
            found = bytes(map(_BYTES.__getitem__, text))
        except KeyError:  # an added token, stored as it reads
            found = text.encode()
        self[token_id] = found
        return found


_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = dict(
    zip(map(chr, [*_PRINTED, *range(0x100, 0x144)]), [*_PRINTED, *sorted({*range(256)} - {*_PRINTED})], strict=True)
)
"""The byte that each character of a byte-level token stands for. Source: GPT-2's `bytes_to_unicode`."""


def _backend(tokenizer: Any, *methods: str) -> Any:
    """Return the tokenizer's `tokenizers` object if it does not override these methods of transformers; else None."""
    if isinstance(tokenizer, ShippedTokenizer):
        return tokenizer.backend_tokenizer
    cls = type(tokenizer)
    names = ("PreTrainedTokenizerFast", "TokenizersBackend")
    base = next((c for c in cls.__mro__ if c.__name__ in names and c.__module__.startswith("transformers.")), None)
    own = [m for m in methods if getattr(cls, m, None) is not getattr(base, m, None) or m in vars(tokenizer)]
    split = getattr(tokenizer, "split_special_tokens", False)
    return None if base is None or own or split else tokenizer.backend_tokenizer


def encoder_of(tokenizer: Any) -> Encoder:
    """Return the tokenizer's encoder, cached until its vocabulary grows."""
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    try:
        return _made(tokenizer, size)
    except TypeError:  # not hashable
        return Encoder(tokenizer)


@functools.lru_cache(maxsize=16)
def _made(tokenizer: Any, size: int) -> Encoder:
    return Encoder(tokenizer)


def _added_tokens(tokenizer: Any) -> tuple[dict[str, int], frozenset[int]]:
    """Return added tokens (except whitespace) by text, and which ids are special."""
    special = set(tokenizer.all_special_ids)
    if tokenizer.eos_token_id is not None:
        special.add(tokenizer.eos_token_id)
    found = getattr(tokenizer, "added_tokens_decoder", None)
    if found is None:
        texts = {str(tokenizer.decode([i], skip_special_tokens=False)): i for i in sorted(special)}
    else:
        texts = {str(token): int(i) for i, token in found.items()}
        special |= {int(i) for i, token in found.items() if getattr(token, "special", False)}
    return {text: i for text, i in texts.items() if text.strip(" \t\r\n▁")}, frozenset(special)
