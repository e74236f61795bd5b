"""Decide whether a request continues a conversation, and if not, what the agent changed.

Messages are compared by role, content, and calls (name, arguments as values), so spacing, JSON key order, whitespace
around an answer, a name of the assistant, and ids renamed in call and result make no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

from agentenv.core.types import Message

Mismatch = Literal["branch", "separate", "system", "tools", "tool_call", "dropped", "edited"]
"""Why a request began a segment.

branch: it continues from an earlier point than the last, or from a point that another running request continues from.
separate: only a system prompt is shared: another conversation, such as a sub-agent's.
system: another system prompt; tools: other tools; tool_call: a call in an answer was written differently.
dropped: messages are missing or replaced by others (compaction). edited: messages were changed or inserted.
"""


MISMATCH = "mismatch"
"""Where a record stores it: in the info of the turn that was answered last before the segment."""


def fingerprint(value: Any) -> str:
    """Return a short text that is equal for equal JSON values."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def message_fingerprint(message: Message, places: Mapping[str, int] | None = None) -> str:
    """Return the fingerprint of a message, without its reasoning, which agents need not send back.

    Args:
        message: as `read_message` returns it.
        places: the calls that a tool result can answer: id to place.
    """
    content = {
        key: value for key, value in message.items() if key != "reasoning_content" and value not in (None, "", [])
    }
    if message["role"] == "assistant":
        content.pop("name", None)
        content["content"] = str(message.get("content") or "").strip()
        content["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]
    elif "tool_call_id" in content:
        content["tool_call_id"] = (places or {}).get(content["tool_call_id"], content["tool_call_id"])
    return fingerprint(content)


def message_fingerprints(messages: Sequence[Message]) -> list[str]:
    """Return the fingerprint of each message of a conversation."""
    prints, places = [], dict[str, int]()
    for message in messages:
        if message["role"] == "assistant":
            places = {call["id"]: place for place, call in enumerate(message.get("tool_calls", ()))}
        prints.append(message_fingerprint(message, places))
    return prints


def chain(tools: Sequence[Mapping[str, Any]], prints: Sequence[str]) -> list[str]:
    """Return a fingerprint of every prefix of a conversation, the empty one first."""
    links = [fingerprint(list(tools))]
    for one in prints:
        links.append(link(links[-1], one))
    return links


def link(before: str, one: str) -> str:
    """Return the next fingerprint of a chain."""
    return hashlib.blake2b((before + one).encode(), digest_size=16).hexdigest()


def classify(
    old: Sequence[Message],
    new: Sequence[Message],
    *,
    old_prints: Sequence[str],
    prints: Sequence[str],
) -> Mismatch:
    """Return why `new` does not continue `old`, a conversation with the same tools that ends with an answer."""
    num = num_shared(old_prints, prints)
    if num == len(old):
        return "edited" if any(message["role"] == "assistant" for message in new[num:]) else "branch"
    old_head, new_head = _num_system(old), _num_system(new)
    rest, new_rest = list(old_prints[old_head:]), list(prints[new_head:])
    is_extended = len(new_rest) > len(rest) and new_rest[: len(rest)] == rest
    if old_prints[:old_head] != prints[:new_head] and is_extended:
        return "system"
    if num < len(new) and old[num]["role"] == new[num]["role"] == "assistant":
        has_calls = any(message.get("tool_calls") for message in (old[num], new[num]))
        contents = [(message.get("content") or "").strip() for message in (old[num], new[num])]
        if has_calls and contents[0] == contents[1]:
            return "tool_call"
    blocks = SequenceMatcher(None, old_prints[old_head:], prints[new_head:], autojunk=False).get_opcodes()
    if not any(tag == "equal" for tag, *_ in blocks):
        return "separate"
    missing = any(tag in ("delete", "replace") and i2 - i1 > j2 - j1 for tag, i1, i2, j1, j2 in blocks)
    return "dropped" if missing else "edited"


def num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the common prefix of fingerprints."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _num_system(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
