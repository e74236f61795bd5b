"""What a session keeps of its conversations, and the Trajectory it makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from agentenv.dialogue import Dialogue, Reply
from agentenv.endpoint.history import MISMATCH, Mismatch, chain, message_fingerprint
from agentenv.endpoint.wire import ChatRequest
from agentenv.trajectory import Trajectory
from agentenv.types import Completion, Message, StepResult


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, with the fingerprints of its messages and of every beginning of them."""

    request: ChatRequest
    prints: list[str]
    links: list[str]

    @property
    def key(self) -> str:
        """The same for the same tools and messages."""
        return self.links[-1]

    @property
    def new(self) -> Sequence[Message]:
        """The messages after the last answer."""
        messages = self.request.messages
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        return messages[last + 1 :]


def asked(request: ChatRequest) -> Asked:
    """The request with its fingerprints."""
    prints = [message_fingerprint(message) for message in request.messages]
    return Asked(request, prints, chain(request.tools, prints))


@dataclass(frozen=True, slots=True)
class Call:
    """One answered request."""

    number: int
    reply: Reply
    """What it added to the tokens; all of them where it begins a segment."""
    opens: bool
    messages: Sequence[Message]
    """Those that came with it, for readers; all of the conversation where it begins a segment."""
    completion: Completion
    action: str
    started: float
    generate_s: float
    mismatch: Mismatch | None


@dataclass(slots=True, eq=False)
class Line:
    """One conversation that only grows: what a segment is made of."""

    dialogue: Dialogue
    mismatch: Mismatch | None = None
    messages: list[Message] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    num_first: int = 0
    """Messages before the first answer that was sampled here."""
    pending: tuple[str, Reply] | None = None
    """What goes on from the last answer, with the request's key: it is being answered, or was in vain."""
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """Where a conversation can be gone on with: behind a prompt, or behind an answer."""

    line: Line
    num_messages: int
    num_ids: int
    action: tuple[list[int], str] | None
    """Ids and text of the answer; None behind a prompt."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request on its way to the engine."""

    asked: Asked
    line: Line
    reply: Reply
    opens: bool
    number: int
    prompt: list[int]
    """All that the model sees."""


def record(lines: Sequence[Line], trajectory: Trajectory) -> list[Call]:
    """Fill an empty trajectory: a segment for each line, in the order of their last answers; gives the turns' calls.

    Every turn but the last gets a result: the messages that came next, all of them where they begin a segment, then
    with the reason in its info (`mismatch`), and reward 0.
    """
    ordered = sorted((line for line in lines if line.calls), key=lambda line: line.calls[-1].number)
    calls = [call for line in ordered for call in line.calls]
    for index, (call, after) in enumerate(pairwise([*calls, None])):
        assert call is not None
        reply = call.reply
        if index == 0:
            trajectory.prompt = ordered[0].messages[: ordered[0].num_first]
            trajectory.tools = _tools(ordered[0])
            trajectory.append_observation(reply.ids)
        elif call.opens:
            trajectory.open_segment(reply.ids, cut=reply.cut)
        else:
            trajectory.append_observation(
                reply.ids, bridge=reply.kind, num_synthesised=reply.num_synthesised, cut=reply.cut
            )
        trajectory.append_turn(call.completion, call.action, call.generate_s)
        if after is not None:
            waited = max(0.0, after.started - call.started - call.generate_s)
            info: dict[str, float | str] = {} if after.mismatch is None else {MISMATCH: after.mismatch}
            trajectory.set_result(StepResult(list(after.messages), info=info), waited)
    return calls


def _tools(line: Line) -> tuple[Mapping[str, Any], ...]:
    return tuple(line.dialogue.tools or ())
