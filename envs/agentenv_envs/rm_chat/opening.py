"""The raw messages that an episode begins with: what a reward model is shown, whatever the policy's template makes.

A reward model renders messages with its own template. Where they hold what the policy's template made of them, it sees
two templates, one inside the other, and its scores mean nothing, which nothing else would tell: such rows are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentenv.chat import PromptText
from agentenv.errors import DataError
from agentenv.rewards.models.render import checked
from agentenv.types import Message

MESSAGES, TURNS, PERSONA = "messages", "user_turns", "persona"
"""Columns: the raw messages where the prompt is a rendering; what the user says later; whom a model plays."""
_ADVICE = f"Give raw messages: the reward model has a template of its own. Or give them in the column {MESSAGES!r}."
_RENDERED = re.compile(r"\s*(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|<(?:s|bos|start_of_turn)>|\[INST\])")


def opening(prompt: str | Sequence[Message], given: Any, system: str | None) -> tuple[Any, list[Message]]:
    """What the policy is shown first, and the raw messages behind it.

    Args:
        prompt: messages; or text, which is what a user says, or a rendering with `given` behind it.
        given: the column with the raw messages, or None.
        system: put before messages that begin with no system message; a rendering is left as it is.

    Raises:
        DataError: there are no raw messages, or their roles are out of order, or it is not the assistant's turn.
    """
    if isinstance(prompt, PromptText):
        prompt = prompt.messages
    if not isinstance(prompt, str):
        messages = _raw(prompt, system)
        return messages, messages
    if not _RENDERED.match(prompt):
        messages = _raw([{"role": "user", "content": prompt}] if given is None else given, system)
        return messages, messages
    if given is None:
        raise DataError(
            f"rm_chat: expected a raw prompt, got one that a chat template made: {prompt!r:.120}. {_ADVICE}"
        )
    return prompt, _raw(given, None)


def _raw(messages: Any, system: str | None) -> list[Message]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise DataError(f"rm_chat: {MESSAGES}: expected messages, got {messages!r:.120}. Correct the row.")
    raw: list[Message] = [*checked([*messages, {"role": "assistant", "content": ""}])[:-1]]
    for index, message in enumerate(raw):
        if _RENDERED.match(message["content"]):
            got = f"one that a chat template made: {message['content']!r:.120}"
            raise DataError(f"rm_chat: message {index}: expected raw text, got {got}. {_ADVICE}")
    if system is None or raw[0]["role"] in ("system", "developer"):
        return raw
    return [{"role": "system", "content": system}, *raw]
