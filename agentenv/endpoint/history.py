"""Whether a request goes on with a conversation, and if not, what the agent did to it.

Messages are compared by what they say: role, content, and calls by id, name and arguments as values, so that another
spacing or order of keys in JSON is no difference, nor is space around an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, get_args

from agentenv.types import Message

Mismatch = Literal["branch", "separate", "system", "tools", "tool_call", "dropped", "edited"]
"""Why a request began a segment.

branch: it goes on from an earlier point than the last, or from one that another request goes on from at this moment.
separate: nothing but a system prompt is shared: a conversation of its own, as a sub-agent has.
system: another system prompt; tools: other tools; tool_call: a call of an answer was written otherwise.
dropped: messages are missing, with or without others in their place (compaction). edited: messages were changed or
put in.
"""


MISMATCH = "mismatch"
"""Where a record keeps it: in the info of the turn that was answered last before the segment."""


def began_anew(info: Mapping[str, Any]) -> bool:
    """Whether the turn of this info is the last before a conversation that an agent began anew."""
    return info.get(MISMATCH) in get_args(Mismatch)


def fingerprint(value: Any) -> str:
    """A short text that is the same for the same JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def message_fingerprint(message: Message) -> str:
    """The fingerprint of what a message says; its reasoning apart, which agents need not send back, is left out."""
    said = {key: value for key, value in message.items() if key != "reasoning_content" and value not in (None, "", [])}
    if message["role"] == "assistant":
        said["content"] = str(message.get("content") or "").strip()
    return fingerprint(said)


def chain(tools: Sequence[Mapping[str, Any]], prints: Sequence[str]) -> list[str]:
    """One fingerprint for every beginning of a conversation, the empty one first."""
    links = [fingerprint(list(tools))]
    for one in prints:
        links.append(link(links[-1], one))
    return links


def link(before: str, one: str) -> str:
    """The next of a chain."""
    return hashlib.blake2b((before + one).encode(), digest_size=16).hexdigest()


def classify(
    old: Sequence[Message],
    new: Sequence[Message],
    *,
    same_tools: bool,
    old_prints: Sequence[str],
    prints: Sequence[str],
) -> Mismatch:
    """What makes `new` no continuation of `old`, a conversation that ends with an answer."""
    num = num_shared(old_prints, prints)
    if num == len(old):
        if not same_tools:
            return "tools"
        return "edited" if any(message["role"] == "assistant" for message in new[num:]) else "branch"
    old_head, new_head = _num_system(old), _num_system(new)
    if old_prints[:old_head] != prints[:new_head] and _is_extended(old_prints[old_head:], prints[new_head:]):
        return "system"
    if num < len(new) and _same_but_calls(old[num], new[num]):
        return "tool_call"
    blocks = SequenceMatcher(None, old_prints[old_head:], prints[new_head:], autojunk=False).get_opcodes()
    if not any(tag == "equal" for tag, *_ in blocks):
        return "separate"
    missing = any(tag in ("delete", "replace") and i2 - i1 > j2 - j1 for tag, i1, i2, j1, j2 in blocks)
    return "dropped" if missing else "edited"


def num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many first fingerprints are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _num_system(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _is_extended(old: Sequence[str], new: Sequence[str]) -> bool:
    return len(new) > len(old) and list(new[: len(old)]) == list(old)


def _same_but_calls(old: Message, new: Message) -> bool:
    """Whether both are answers that say the same beside their calls."""
    calls = (old.get("tool_calls"), new.get("tool_calls"))
    both = old["role"] == new["role"] == "assistant" and any(calls)
    return both and (old.get("content") or "").strip() == (new.get("content") or "").strip()
