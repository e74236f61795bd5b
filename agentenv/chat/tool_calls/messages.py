"""Tool calls and their results as chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentenv.core.tool_calls import MalformedCall, ParsedAction, ToolCall
from agentenv.core.types import Message


def result_message(call: ToolCall | MalformedCall, content: Any) -> Message:
    """Return the answer to a call as a message: text unchanged, other values as JSON."""
    return {
        "role": "tool",
        "tool_call_id": call.call_id,
        "name": call.name or "invalid",
        "content": (content if isinstance(content, str) else _as_json(content)).encode("utf-8", "replace").decode(),
    }


def named_results(messages: Sequence[Message], calls: Sequence[tuple[str, str]]) -> list[Message]:
    """Return the messages after calls, given as ids and names, with the name of its call in every tool result.

    A result without a name has that of the call with its id, or else of the call in its place.
    """
    names, places = dict(calls), iter([name for _, name in calls])
    named = []
    for message in messages:
        if message.get("role") == "tool":
            place = next(places, "")
            name = message.get("name") or names.get(str(message.get("tool_call_id") or "")) or place
            message = {**message, "name": name} if name else message
        named.append(message)
    return named


def assistant_message(parsed: ParsedAction, *, as_json: bool = False) -> Message:
    """Return the action as a structured message, for conversations that are rendered again.

    A malformed call becomes a call of its name (or of "invalid") with its text as the only argument, so that every
    answer has a matching call. With `as_json`, arguments are JSON text (`ToolFormat.arguments_as_json`).
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    calls = []
    for item in parsed.items:
        arguments = dict(item.arguments) if isinstance(item, ToolCall) else {"text": item.text}
        function = {"name": item.name or "invalid", "arguments": _as_json(arguments) if as_json else arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # non-text keys, a circular reference
        return str(value)
