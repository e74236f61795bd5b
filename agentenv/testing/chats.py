"""The chats of checks and audits, each created once per process, since probing a template is slow."""

from __future__ import annotations

from functools import cache

from agentenv.chat.chat import Chat
from agentenv.engines.models import load_tokenizer, resolve_model
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
    """Return a chat that needs no files and whose template has no tools."""
    return Chat(CharTokenizer())


@cache
def with_tools() -> Chat:
    """Return the chat of tiny-math, whose template has tools."""
    return Chat(load_tokenizer(resolve_model("tiny-math")))


@cache
def every_kind() -> tuple[Chat, ...]:
    """Return the chat of tiny-math, and one for each peculiarity of templates and tokenizers."""
    return (with_tools(), *(Chat(kind()) for kind in _PATHOLOGICAL))
