"""Tokenizers that need no download, each with one of the habits that break naive loops.

They have the part of a Hugging Face tokenizer that agentenv uses (`agent.Tokenizer`), and a ChatML template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EOS = "<|im_end|>"
_SPECIAL = (EOS, "<|im_start|>")


class CharTokenizer:
    """One id per character; ids of unknown characters are their code points above the specials."""

    eos_token_id: int | None = 0
    chat_template: Any = "chatml"

    def __init__(self) -> None:
        self.all_special_ids = list(range(len(_SPECIAL)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; the two special strings become one id each."""
        ids: list[int] = []
        while text:
            found = next((i for i, special in enumerate(_SPECIAL) if text.startswith(special)), None)
            piece = _SPECIAL[found] if found is not None else self._piece(text)
            ids += [found] if found is not None else self._ids(piece)
            text = text[len(piece) :]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Ids to text."""
        return "".join(self._text(i) for i in token_ids if not (skip_special_tokens and i in self.all_special_ids))

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        """ChatML."""
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}{EOS}\n" for m in conversation)
        return turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _piece(self, text: str) -> str:
        return text[0]

    def _ids(self, piece: str) -> list[int]:
        return [ord(piece) + len(_SPECIAL)]

    def _text(self, token_id: int) -> str:
        return _SPECIAL[token_id] if token_id < len(_SPECIAL) else chr(token_id - len(_SPECIAL))


_FIRST_MERGE = 0x110000 + len(_SPECIAL)  # above the id of the last character
_MERGES = ("\n\n", "  ", "the", "an", "er", "in", "12", "23", "34", "ab", "abc", "bc", ".\n", "!\n", "> ")


class MergingTokenizer(CharTokenizer):
    """Merges neighbours greedily, so that encode(a + b) often differs from encode(a) + encode(b)."""

    def _piece(self, text: str) -> str:
        found = [merge for merge in _MERGES if text.startswith(merge)]
        return max(found, key=len, default=text[0])

    def _ids(self, piece: str) -> list[int]:
        return [_FIRST_MERGE + _MERGES.index(piece)] if piece in _MERGES else super()._ids(piece)

    def _text(self, token_id: int) -> str:
        return _MERGES[token_id - _FIRST_MERGE] if token_id >= _FIRST_MERGE else super()._text(token_id)


class ByteFallbackTokenizer(CharTokenizer):
    """ASCII by character, everything else by UTF-8 bytes: one character may be several ids, and a cut may split it."""

    def _ids(self, piece: str) -> list[int]:
        return [byte + len(_SPECIAL) for byte in piece.encode("utf-8", "surrogatepass")]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Ids to text; bytes that are no whole character become U+FFFD."""
        parts: list[bytes] = []
        for i in token_ids:
            if i >= len(_SPECIAL):
                parts.append(bytes([i - len(_SPECIAL)]))
            elif not skip_special_tokens:
                parts.append(_SPECIAL[i].encode())
        return b"".join(parts).decode("utf-8", "replace")
