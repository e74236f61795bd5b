"""Tokenizers that need no download, each with one property that breaks naive loops.

They have the part of a Hugging Face tokenizer that agentenv uses (`agent.Tokenizer`), and a ChatML template unless
stated otherwise. An environment, an engine or a loop that is right on all of them is right on real ones too.

- `CharTokenizer`: none; the plain case.
- `MergingTokenizer`: text encoded in two parts has other tokens than text encoded at once.
- `ByteFallbackTokenizer`: a cut may split a character.
- `RewritingTokenizer`: the template drops the reasoning of earlier turns.
- `LongPromptTokenizer`: the generation prompt is several tokens, and they vanish from history.
- `OpenEndedTokenizer`: nothing closes a turn, and role markers are plain text.
- `BosTokenizer`: the template writes a BOS, and encoding writes another.
- `ToollessTokenizer`: the template renders no tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.engines.scripted import chatml

EOS = "<|im_end|>"
_SPECIAL = (EOS, "<|im_start|>")
_SPLIT = re.compile("(<\\|im_end\\|>|<\\|im_start\\|>|<\\|begin\\|>)")
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class CharTokenizer:
    """One id per character; ids of unknown characters are their code points above the specials."""

    eos_token_id: int | None = 0
    chat_template: Any = "chatml"
    specials: tuple[str, ...] = _SPECIAL
    """The special tokens; a token's id is its place."""

    def __init__(self) -> None:
        self.all_special_ids = list(range(len(self.specials)))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that can be decoded."""
        return len(self.specials) + 0x110000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text in linear time; special strings become one id each."""
        ids: list[int] = []
        for part in _SPLIT.split(text):
            if part in self.specials:
                ids.append(self.specials.index(part))
            elif part:
                ids += self._plain(part)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode ids to text."""
        num = len(self.specials)
        return "".join(self._texts([i for i in token_ids if i >= num] if skip_special_tokens else token_ids))

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, tools: Any = None,
        **_: Any,
    ) -> str:  # fmt: skip
        """Render ChatML, with the tools in a system message."""
        return chatml(conversation, tools, add_generation_prompt=add_generation_prompt)

    def _plain(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        first = len(self.specials)
        return [ord(character) + first for character in text]

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token."""
        specials, num = self.specials, len(self.specials)
        return [chr(i - num) if i >= num else specials[i] for i in token_ids]


_FIRST_MERGE = 0x110000 + len(_SPECIAL)  # above the id of the last character
_MERGES = ("\n\n", "  ", "the", "an", "er", "in", "12", "23", "34", "ab", "abc", "bc", ".\n", "!\n", "> ")
_MERGE_ID = {merge: _FIRST_MERGE + place for place, merge in enumerate(_MERGES)}
_PIECES = re.compile("|".join(re.escape(merge) for merge in sorted(_MERGES, key=len, reverse=True)) + "|.", re.DOTALL)


class MergingTokenizer(CharTokenizer):
    """A tokenizer that merges neighbors greedily, so that encode(a + b) often differs from encode(a) + encode(b).

    What it catches: loops that encode the whole conversation again each turn and look for the old tokens at its start
    (prime-rl's assertion on token prefixes, its issues 947 and 1334).
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that can be decoded."""
        return _FIRST_MERGE + len(_MERGES)

    def _plain(self, text: str) -> list[int]:
        first = len(self.specials)
        return [_MERGE_ID[piece] if piece in _MERGE_ID else ord(piece) + first for piece in _PIECES.findall(text)]

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        specials, num = self.specials, len(self.specials)
        return [
            _MERGES[i - _FIRST_MERGE] if i >= _FIRST_MERGE else chr(i - num) if i >= num else specials[i]
            for i in token_ids
        ]


class ByteFallbackTokenizer(CharTokenizer):
    """ASCII by character, everything else by UTF-8 bytes: one character may be several ids, and a cut may split it.

    What it catches: text that is decoded piece by piece and encoded again, in which a split character is U+FFFD.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that can be decoded."""
        return len(self.specials) + 256

    def _plain(self, text: str) -> list[int]:
        first = len(self.specials)
        return [byte + first for byte in text.encode("utf-8", "surrogatepass")]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode ids to text; incomplete characters become U+FFFD."""
        parts: list[bytes] = []
        num = len(self.specials)
        for i in token_ids:
            if i >= num:
                parts.append(bytes([i - num]))
            elif not skip_special_tokens:
                parts.append(self.specials[i].encode())
        return b"".join(parts).decode("utf-8", "replace")


class RewritingTokenizer(CharTokenizer):
    """A template that drops `<think>…</think>` of every assistant's turn but the last, as Qwen3's does.

    What it catches: loops that render the conversation again each turn, and then train on tokens that were not sampled
    or fail when the old tokens are not a prefix of the new ones (prime-rl's issues 947 and 1334).
    """

    chat_template: Any = "chatml, reasoning of earlier turns dropped"

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        """ChatML without reasoning before the last user's message."""
        last = max((i for i, message in enumerate(conversation) if message["role"] == "user"), default=0)
        messages = [
            {**message, "content": _THOUGHT.sub("", str(message["content"]))}
            if message["role"] == "assistant" and place < last
            else message
            for place, message in enumerate(conversation)
        ]
        return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **options)


class LongPromptTokenizer(CharTokenizer):
    """A generation prompt of several tokens that opens reasoning, and is not in the history of the same turn.

    So DeepSeek-R1's and Qwen3.5's. What it catches: loops that take the generation prompt for one token, or cut it off
    by its length in history (prime-rl's issue 658).
    """

    chat_template: Any = "chatml, reasoning opened by the generation prompt"

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        """ChatML, with `<think>` and a newline after the assistant's header."""
        text = super().apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, **options)
        return text + "<think>\n" * add_generation_prompt


class OpenEndedTokenizer(CharTokenizer):
    """A template of text alone that closes no turn: `User: …`, `Assistant: …`, and no end-of-sequence token.

    What it catches: loops that look for the token that ends a turn, or add EOS after every action; and content that
    forges a turn, since a role's marker is plain text.
    """

    eos_token_id: int | None = None
    chat_template: Any = "plain text, turns without a close"
    specials: tuple[str, ...] = ()

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        """Paragraphs with the role before each."""
        turns = "".join([f"{str(m['role']).capitalize()}: {m['content']}\n\n" for m in conversation])
        return turns + "Assistant:" * add_generation_prompt


class BosTokenizer(CharTokenizer):
    """A template that writes a BOS, and an `encode` that puts another in front unless it is told not to, as Llama 3's.

    What it catches: renderings that are encoded with special tokens, so that every prompt begins with two BOS: 25 of 58
    families of templates that we looked at allow it.
    """

    bos_token: str = "<|begin|>"
    bos_token_id: int = 2
    chat_template: Any = "chatml after a BOS"
    specials: tuple[str, ...] = (*_SPECIAL, "<|begin|>")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids, after a BOS where special tokens are asked for."""
        return [self.bos_token_id] * add_special_tokens + super().encode(text)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        """ChatML after a BOS."""
        text = super().apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, **options)
        return self.bos_token + text


class ToollessTokenizer(CharTokenizer):
    """A template that drops offered tools, as that of many older models.

    What it catches: environments that offer tools whatever `states["renders_tools"]` says.
    """

    chat_template: Any = "chatml without tools"

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, tools: Any = None,
        **options: Any,
    ) -> str:  # fmt: skip
        """ChatML without the tools."""
        return super().apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, **options)


PECULIAR: tuple[type[CharTokenizer], ...] = (
    MergingTokenizer, ByteFallbackTokenizer, RewritingTokenizer, LongPromptTokenizer, OpenEndedTokenizer, BosTokenizer,
)  # fmt: skip
"""The kinds whose template or encoding breaks naive loops."""
