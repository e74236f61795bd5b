"""Tools in a conversation: whether the chat template renders them, and the role of their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.chat.chat import Chat, Reply, text_of
from agentenv.core.types import Message
from agentenv.errors import ConfigError, ContractError

REFUSED_TOOLS = "reset: expected no tools for a chat template that renders none"
"""The start of the error for tools that the template would drop."""


def check_schemas(tools: Any) -> None:
    """Raise ContractError if the tools are neither missing nor a list of schemas."""
    is_list = isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)
    if tools and not is_list:
        raise ContractError(
            f"reset: expected a list of tool schemas under 'tools', got {tools!r:.200}. "
            "Make them with agentenv.tools.schema_of(function)."
        )


def check_tools(chat: Chat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise ContractError if the chat template does not render the tools."""
    if not tools:
        return
    if chat.has_template and chat.template.tools_change_turns:
        raise ContractError(
            "reset: expected no tools, because the chat template renders later turns differently when tools are "
            f"offered, got {len(tools)}. Describe them in a message, or use another model."
        )
    # A template that renders tools also renders duplicates.
    if chat.render(messages, tools) == chat.render(messages, [*tools, *tools]):
        raise ContractError(
            f"{REFUSED_TOOLS}, got {len(tools)}. If states['renders_tools'] is False, leave out `tools` and describe "
            "them in a message: states['tool_calls'] reads <tool_call>{…}</tool_call> then; or use another model."
        )


def bridge_with_tools(
    chat: Chat, action_ids: Sequence[int], messages: Sequence[Message], history: Sequence[Message] | None
) -> Reply:
    """Return `Chat.bridge`; if the template lacks a role for tool results, its error names the option for them."""
    try:
        return chat.bridge(action_ids, messages, history=history)
    except ConfigError as error:
        if not any(message.get("role") == "tool" for message in messages) or "tool" in chat.template.shapes:
            raise
        raise ConfigError(
            f"{error} It has no role for tool results: --tool_role user (ChatOptions.tool_role) makes them user "
            "messages."
        ) from error


def with_known_roles(chat: Chat, messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages; if `ChatOptions.tool_role` is user, tool results that the template lacks a role for change.

    They become user messages; for templates in which roles alternate, neighbors become one message.
    """
    if chat.options.tool_role != "user" or not chat.has_template or "tool" in chat.template.shapes:
        return messages
    chat.check_parts(messages)  # neighbors are joined as text
    merge = "2xuser" not in chat.template.shapes
    users: list[Message] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") != "tool" and not (merge and users and message.get("role") == "user"):
            users.append(message)
            continue
        last = users.pop() if merge and users and users[-1].get("role") == "user" else None
        # A merged message is trusted only if both are: a result must not gain the trust of a question beside it.
        trusted = {"trusted": True} if all(m is None or m.get("trusted") is True for m in (last, message)) else {}
        merged = content if last is None else f"{text_of(last)}\n\n{text_of(message)}"
        users.append({"role": "user", "content": merged, **trusted})
    return users


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return offered tools as text: how to call one, and one schema per line."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    return f"You may call these tools:\n<tools>\n{schemas}\n</tools>\nCall one by saying:\n{form}"
