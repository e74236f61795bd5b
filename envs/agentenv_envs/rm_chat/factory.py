"""The raw messages at the start of an episode, which a reward model sees independently of the policy's template.

A reward model renders messages with its own template. If they contain the policy's rendering, it sees one template
inside another and its scores are meaningless, which nothing else would show: such rows are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentenv.chat.chat import PromptText
from agentenv.core.types import Message
from agentenv.errors import DataError
from agentenv.rewards.models.render import checked

MESSAGES, TURNS, PERSONA = "messages", "user_turns", "persona"
"""Columns: raw messages, if the prompt is a rendering; the user's later messages; the persona of a played user."""
_ADVICE = f"Use raw messages: the reward model has its own template. Or put them into the column {MESSAGES!r}."
_RENDERED = re.compile(r"\s*(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|<(?:s|bos|start_of_turn)>|\[INST\])")


def first_messages(prompt: str | Sequence[Message], column: Any, system: str | None) -> tuple[Any, list[Message]]:
    """Return the first observation for the policy, and the raw messages behind it.

    Args:
        prompt: messages; or text, either a user's message or a rendering of the messages in `column`.
        column: the row's column with the raw messages, or None.
        system: inserted before messages without a system message; a rendering stays unchanged.

    Raises:
        DataError: raw messages are missing, or their roles are out of order, or it is not the assistant's turn.
    """
    if isinstance(prompt, PromptText):
        prompt = prompt.messages
    if not isinstance(prompt, str):
        messages = _raw(prompt, system)
        return messages, messages
    if not _RENDERED.match(prompt):
        messages = _raw([{"role": "user", "content": prompt}] if column is None else column, system)
        return messages, messages
    if column is None:
        raise DataError(f"rm_chat: expected a raw prompt, got a chat template's text: {prompt!r:.120}. {_ADVICE}")
    return prompt, _raw(column, None)


def _raw(messages: Any, system: str | None) -> list[Message]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise DataError(f"rm_chat: {MESSAGES}: expected messages, got {messages!r:.120}. Correct the row.")
    raw: list[Message] = [*checked([*messages, {"role": "assistant", "content": ""}])[:-1]]
    for index, message in enumerate(raw):
        if _RENDERED.match(message["content"]):
            got = f"a chat template's text: {message['content']!r:.120}"
            raise DataError(f"rm_chat: message {index}: expected raw text, got {got}. {_ADVICE}")
    if system is None or raw[0]["role"] in ("system", "developer"):
        return raw
    return [{"role": "system", "content": system}, *raw]
