"""Tool calls and their results as chat messages, and ids of calls that have none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from agentenv.chat.tool_calls.syntax import Syntax
from agentenv.core.tool_calls import MalformedCall, ParsedAction, ToolCall
from agentenv.core.types import Message
from agentenv.errors import ContractError

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+>")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def result_message(call: ToolCall | MalformedCall, content: Any) -> Message:
    """Return the answer to a call as a message: text unchanged, other values as JSON."""
    return {
        "role": "tool",
        "tool_call_id": call.call_id,
        "name": call.name or "invalid",
        "content": (content if isinstance(content, str) else _as_json(content, call.name))
        .encode("utf-8", "replace")
        .decode(),
    }


def in_form(messages: Sequence[Message], form: Syntax) -> list[Message]:
    """Return normalized messages with calls as a template takes them: arguments as JSON text, or as an object.

    Text that is not an object becomes the argument `text` of one.
    """

    def shaped(call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = call["function"]["arguments"]
        if form.arguments_as_json and not isinstance(arguments, str):
            arguments = _as_json(arguments, f"tool_calls: {call['function'].get('name')}")
        elif not form.arguments_as_json and isinstance(arguments, str):
            arguments = {"text": arguments}
        return {**call, "function": {**call["function"], "arguments": arguments}}

    found: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            content = message.get("content") or form.content_of_calls
            message = {**message, "content": content, "tool_calls": [shaped(call) for call in calls]}
        found.append(message)
    return found


def assistant_message(parsed: ParsedAction, *, as_json: bool = False) -> Message:
    """Return the action as a structured message, for conversations that are rendered again.

    A malformed call becomes a call of its name (or of "invalid") with its text as the only argument, so that every
    answer has a matching call. With `as_json`, arguments are JSON text (`ToolFormat.arguments_as_json`).
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    calls = []
    for item in parsed.items:
        arguments = dict(item.arguments) if isinstance(item, ToolCall) else {"text": item.text}
        function = {
            "name": item.name or "invalid",
            "arguments": _as_json(arguments, item.name) if as_json else arguments,
        }
        calls.append({"id": item.call_id, "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _as_plain(where: str, value: Any) -> Any:
    """Return the value of an enum's member, as calls give it, and anything else as text.

    Raises:
        ContractError: the text is an address in memory.
    """
    if isinstance(value, Enum):
        return value.value
    if _ADDRESS.search(text := str(value)):
        got = f"an object of {type(value).__module__}.{type(value).__qualname__}"
        what = "expected text, numbers, lists or dicts"
        raise ContractError(f"{where}: {what}, got {got}, which has no text. Convert it.")
    return text


def _as_json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=partial(_as_plain, where))
    except ContractError:
        raise
    except (TypeError, ValueError, RecursionError):  # non-text keys, a circular reference
        return str(value)


def call_id(turn_index: int, index: int) -> str:
    """Return nine letters and digits (Mistral's templates accept nothing else) for the call at `index` of a turn."""
    return f"c{_base36(turn_index)}{_base36(index)}"


def _base36(number: int) -> str:
    digits = ""
    for _ in range(4):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
