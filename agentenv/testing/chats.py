"""The chats of checks and audits, each created once per process, since probing a template is slow; offered tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agentenv.chat.chat import Chat
from agentenv.core.types import Limits, Task
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.episode.loop import AgentFactory
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import EpisodeFailed
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
    return of_model("tiny-math")


@cache
def of_model(model: str) -> Chat:
    """Return the chat of a model: a name, a folder or a Hugging Face id.

    Raises:
        ConfigError: its tokenizer cannot be loaded.
    """
    return Chat(load_tokenizer(resolve_model(model)))


async def offered_tools(
    make: AgentFactory, tasks: Sequence[Task], limits: Limits, chat: Chat
) -> Sequence[Mapping[str, Any]]:
    """Return the tools that an environment offers for any of the tasks in this chat."""

    async def of(task: Task) -> Sequence[Mapping[str, Any]]:
        key = EpisodeKey("tools", seed=task.seed or 0)
        async with SteppedEpisode(make, task, chat=chat, limits=limits, key=key) as episode:
            with contextlib.suppress(EpisodeFailed):  # what examines the environment reports it
                await episode.begin()
        return episode.trajectory.tools

    offered = await asyncio.gather(*map(of, tasks))
    return list({repr(tool): tool for tools in offered for tool in tools}.values())


@cache
def every_kind() -> tuple[Chat, ...]:
    """Return the chat of tiny-math, and one for each peculiarity of templates and tokenizers."""
    return (with_tools(), *(Chat(kind()) for kind in _PATHOLOGICAL))
