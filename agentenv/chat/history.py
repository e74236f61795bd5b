"""Render a conversation again: the option `ChatOptions.history="rerender"`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.chat.chat import Chat
from agentenv.chat.tool_calls.messages import assistant_message
from agentenv.core.tool_calls import ParsedAction
from agentenv.core.types import Message
from agentenv.errors import ConfigError


def assistant_turn(chat: Chat, sampled: Sequence[int], action: str, parsed: ParsedAction | None) -> Message:
    """Return the assistant's turn as a message, with its tool calls if `parsed` has any.

    It is trusted only if its text, encoded again, has the added tokens that were sampled: text that merely spells such
    a token must not become one by being encoded.
    """
    is_trusted = chat.added_in(chat.encode(action)) == chat.added_in(chat.without_close(sampled))
    message: Message
    if parsed is not None and parsed.items:
        message = assistant_message(parsed, as_json=chat.tool_format.arguments_as_json)
    else:
        prompt = chat.template.generation_prompt if chat.has_template else ""
        opens, closes, _ = (chat.template.reasoning if prompt else None) or ("", "", "")
        # Reasoning opened by the generation prompt belongs to the assistant's text.
        opened = prompt[prompt.rfind(opens) :] if opens and prompt.rfind(opens) > prompt.rfind(closes) else ""
        message = {"role": "assistant", "content": opened + action}
    return {**message, "trusted": True} if is_trusted else message


def rendered_again(chat: Chat, messages: Sequence[Message], tools: Any, appended: list[int]) -> list[int] | None:
    """Return the ids of the conversation rendered whole; None if they say what `appended` says, or if that fails."""
    try:
        text, mark = chat.rendering(messages, tools)
    except ConfigError:
        return None
    said = chat.decode(appended)
    if chat.unmarked(text, mark) == said:  # nothing to encode
        return None
    rendered = chat.start(text, mark)
    return None if chat.decode(rendered) == said else rendered
