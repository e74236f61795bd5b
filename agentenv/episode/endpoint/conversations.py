"""The conversations of a session, and the Trajectory built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from agentenv.chat.dialogue import Dialogue, Reply
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Message, StepResult
from agentenv.episode.endpoint.history import MISMATCH, Mismatch, chain, message_fingerprints
from agentenv.episode.endpoint.wire import ChatRequest


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
    prints = message_fingerprints(request.messages)
    return Asked(request, prints, chain(request.tools, prints))


@dataclass(frozen=True, slots=True)
class Call:
    """One answered request."""

    number: int
    reply: Reply
    """The tokens it added; all tokens if it begins a segment."""
    opens: bool
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
