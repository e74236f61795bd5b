"""The chats of checks and audits, each created once per process, since probing a template is slow; offered tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agentenv.chat.chat import Chat, text_of
from agentenv.core.types import Limits, Message, Task
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.episode.loop import AgentFactory
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import EpisodeFailed
from agentenv.testing.tokenizers import PECULIAR, CharTokenizer, ToollessTokenizer


@cache
def stand_in() -> Chat:
    """Return the chat where no model is named: it needs no files, and its template renders tools."""
    return Chat(CharTokenizer())


@cache
def without_tools() -> Chat:
    """Return a chat whose template renders no tools."""
    return Chat(ToollessTokenizer())


@cache
def of_model(model: str) -> Chat:
    """Return the chat of a model: a name, a folder or a Hugging Face id.

    Raises:
        ConfigError: its tokenizer cannot be loaded.
    """
    return Chat(load_tokenizer(resolve_model(model)))


async def offered_tools(
    make: AgentFactory, tasks: Sequence[Task], limits: Limits, chat: Chat
) -> list[Sequence[Mapping[str, Any]]]:
    """Return the tools that an environment offers for each of the tasks in this chat."""

    async def of(task: Task) -> Sequence[Mapping[str, Any]]:
        key = EpisodeKey("tools", seed=task.seed or 0)
        async with SteppedEpisode(make, task, chat=chat, limits=limits, key=key) as episode:
            with contextlib.suppress(EpisodeFailed):  # what examines the environment reports it
                await episode.begin()
        return episode.trajectory.tools

    return await asyncio.gather(*map(of, tasks))


def observation_text(observation: str | Sequence[Message]) -> str:
    """Return an observation as text: that of its messages, in lines."""
    return observation if isinstance(observation, str) else "\n".join(map(text_of, observation))


@cache
def every_kind() -> tuple[Chat, ...]:
    """Return the chat of tiny-math, and one for each peculiarity of templates and tokenizers."""
    return (of_model("tiny-math"), *(Chat(kind()) for kind in PECULIAR))
