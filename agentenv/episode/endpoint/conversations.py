"""The conversations of a session: whether a request continues one, what else the agent changed, and their Trajectory.

Messages are compared by role, content, and calls (name, arguments as values), so spacing, JSON key order, whitespace
around an answer, a name of the assistant, and ids renamed in call and result make no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, Literal

from agentenv.chat.chat import Reply
from agentenv.chat.dialogue import Dialogue
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Message, StepResult
from agentenv.episode.endpoint.wire import ChatRequest

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
    old: Sequence[Message], new: Sequence[Message], *, old_prints: Sequence[str], prints: Sequence[str]
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, with fingerprints of its messages and of every prefix."""

    request: ChatRequest
    prints: list[str]
    links: list[str]

    @property
    def key(self) -> str:
        """Equal for equal tools and messages."""
        return self.links[-1]

    @property
    def new(self) -> Sequence[Message]:
        """The messages after the last answer."""
        messages = self.request.messages
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        return messages[last + 1 :]


def asked(request: ChatRequest) -> Asked:
    """Return the request with its fingerprints."""
    prints, places = [], dict[str, int]()
    for message in request.messages:
        if message["role"] == "assistant":
            places = {call["id"]: place for place, call in enumerate(message.get("tool_calls", ()))}
        prints.append(message_fingerprint(message, places))
    return Asked(request, prints, chain(request.tools, prints))


@dataclass(frozen=True, slots=True)
class Call:
    """One answered request."""

    number: int
    reply: Reply
    """The tokens it added; all tokens if it begins a segment."""
    messages: Sequence[Message]
    """The messages that came with it, for readers; the whole conversation if it begins a segment."""
    completion: Completion
    action: str
    started: float
    generate_s: float
    mismatch: Mismatch | None


@dataclass(slots=True, eq=False)
class Line:
    """One conversation that only grows; it becomes a segment."""

    dialogue: Dialogue
    mismatch: Mismatch | None = None
    messages: list[Message] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    num_first: int = 0
    """Number of messages before the first answer that was sampled here."""
    pending: tuple[str, Reply] | None = None
    """The reply that continues the last answer, with its request's key; its answer is in progress or failed."""
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A point at which a conversation can continue: after a prompt, or after an answer."""

    line: Line
    num_messages: int
    num_ids: int
    action: tuple[list[int], str] | None
    """Ids and text of the answer; None after a prompt."""

    def is_end_for(self, asked: Asked) -> bool:
        """Return True if a request that continues from here is the next of the conversation."""
        line = self.line
        is_last = self.action is not None and self.num_messages == len(line.messages) and not line.is_busy
        return is_last and (line.pending is None or line.pending[0] == asked.key)

    def has_ids_of(self, asked: Asked) -> bool:
        """Return True if a request has the recorded ids of the last answer's calls."""
        last = self.num_messages - 1
        return call_ids(self.line.messages[last]) == call_ids(asked.request.messages[last])


def call_ids(message: Message) -> list[str]:
    """Return the ids of a message's calls."""
    return [call["id"] for call in message.get("tool_calls", ())]


def continued(asked: Asked, point: Point) -> Asked:
    """Return a request with the messages recorded up to a point, and their ids in the results of calls after it."""
    num = point.num_messages
    known, given = point.line.messages[:num], asked.request.messages
    own = dict(zip(call_ids(given[num - 1]), call_ids(known[-1]), strict=True))
    following = [
        {**message, "tool_call_id": own.get(message["tool_call_id"], message["tool_call_id"])}
        if message["role"] == "tool"
        else message
        for message in given[num:]
    ]
    return replace(asked, request=replace(asked.request, messages=(*known, *following)))


@dataclass(frozen=True, slots=True)
class Work:
    """A request on its way to the engine."""

    asked: Asked
    line: Line
    reply: Reply
    opens: bool
    number: int
    prompt: list[int]
    """All tokens that the model sees."""


def record(lines: Sequence[Line], trajectory: Trajectory, started_s: float) -> list[Call]:
    """Fill an empty trajectory: a segment for each line, in the order of their last answers; return the turns' calls.

    `started_s` is the episode's start on the clock of `Call.started`.

    Every turn but the last gets a result with reward 0 and the messages that came next; if they begin a segment, all of
    its messages, with the reason in its info (`mismatch`).
    """
    ordered = sorted((line for line in lines if line.calls), key=lambda line: line.calls[-1].number)
    calls = [call for line in ordered for call in line.calls]
    for index, (call, after) in enumerate(pairwise([*calls, None])):
        assert call is not None
        reply = call.reply
        if index == 0:
            trajectory.prompt = ordered[0].messages[: ordered[0].num_first]
            trajectory.tools = tuple(ordered[0].dialogue.tools or ())
            trajectory.append_observation(reply.ids)
        else:
            reply.write_to(trajectory)
        trajectory.append_turn(call.completion, call.action, call.generate_s, began_s=call.started - started_s)
        if after is not None:
            waited = max(0.0, after.started - call.started - call.generate_s)
            info: dict[str, float | str] = {} if after.mismatch is None else {MISMATCH: after.mismatch}
            trajectory.set_result(StepResult(list(after.messages), info=info), waited)
    return calls
