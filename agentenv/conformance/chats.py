"""The tokenizers that a check speaks through, each with its template found out once for all checks of a process."""

from __future__ import annotations

from functools import cache

from agentenv.chat import Chat
from agentenv.loading import load_tokenizer, resolve_model
from agentenv.testing.tokenizers import (
    BosTokenizer,
    ByteFallbackTokenizer,
    CharTokenizer,
    LongPromptTokenizer,
    MergingTokenizer,
    OpenEndedTokenizer,
    RewritingTokenizer,
)

_PATHOLOGICAL = (
    MergingTokenizer, ByteFallbackTokenizer, RewritingTokenizer, LongPromptTokenizer, OpenEndedTokenizer, BosTokenizer,
)  # fmt: skip


@cache
def plain() -> Chat:
    """One that needs no files, and whose template has no tools."""
    return Chat(CharTokenizer())


@cache
def with_tools() -> Chat:
    """tiny-math's, whose template has tools."""
    return Chat(load_tokenizer(resolve_model("tiny-math")))


@cache
def every_kind() -> tuple[Chat, ...]:
    """tiny-math's, and one for each oddity that templates and tokenizers have."""
    return (with_tools(), *(Chat(kind()) for kind in _PATHOLOGICAL))
