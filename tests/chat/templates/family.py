"""What a family of chat templates is, and how its tokenizer is made."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.chat.templates.base_tokenizers import Kind, trained

TEMPLATES = Path(__file__).parent
Class = Literal["prefix-stable", "needs-bridge", "unsupported"]


@dataclass(frozen=True)
class Added:
    """A token that the family adds to its base vocabulary."""

    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template with the tokens around it, and the behavior that is known of it."""

    name: str
    template: Path
    tokenizer: Kind
    added_tokens: tuple[Added, ...]
    eos_token: str
    bos_token: str | None = None
    adds_bos: bool = False
    """Whether encoding with special tokens puts a BOS in front: a second one, if the template has its own."""
    stop_tokens: tuple[str, ...] = ()
    """The texts of the ids an engine stops on: generation_config's list, which need not hold the close."""
    close: str = ""
    """What the template renders after an answer, up to the first stop token; empty without a close or with code S."""
    codes: str = ""
    expected_class: Class = "prefix-stable"
    shapes: tuple[str, ...] = ("user",)
    """Follow-ups that render, of: user, tool, tools, tool+user, 2xuser, system."""
    needs_tools: bool = False
    """The template fails when `tools` is None."""
    parts: bool = False
    """Content must be a list of parts: [{"type": "text", "text": ...}]."""


@functools.cache
def load(family: Family) -> Any:
    """A fast tokenizer with the family's template, tokens and stops; do not change it, it is shared.

    Returns: a transformers.PreTrainedTokenizerFast.
    """
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(trained(family.tokenizer))
    flags = {
        t.text: AddedToken(t.text, special=t.special, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
        for t in family.added_tokens
    }
    backend.add_special_tokens([token for token in flags.values() if token.special])
    backend.add_tokens([token for token in flags.values() if not token.special])
    if family.adds_bos and family.bos_token is not None:
        bos = family.bos_token
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    named = {"eos_token": flags[family.eos_token]}
    if family.bos_token is not None:
        named["bos_token"] = flags[family.bos_token]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = family.template.read_text(encoding="utf-8")
    return tokenizer


def specials(texts: str) -> tuple[Added, ...]:
    """Special tokens of these texts, parted by spaces."""
    return tuple(Added(text) for text in texts.split())


def plain(texts: str) -> tuple[Added, ...]:
    """Added tokens that are not special: `split_special_tokens` does not keep text from forging them."""
    return tuple(Added(text, special=False) for text in texts.split())


def stop_ids(family: Family) -> list[int]:
    """Return the ids on which the family's engine stops, besides EOS."""
    return list(load(family).convert_tokens_to_ids(list(family.stop_tokens)))
