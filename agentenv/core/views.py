"""Two views of a record: the spans of a segment by origin, and the conversation as messages. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Message

SpanKind = Literal["prompt", "action", "close", "feedback"]
"""Origin of tokens: the prompt, the policy, the loop if it closed a turn for the policy, the environment."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a segment with one origin: `token_ids[start:end]`."""

    start: int
    end: int
    kind: SpanKind
    turn: int
    """Index in `Trajectory.turns` of the action, or of the action before a close or feedback; -1 for a prompt."""


def spans_of(trajectory: Trajectory, segment: int = 0) -> list[Span]:
    """Return non-empty spans that cover the segment's tokens in order, without gap or overlap."""
    spans, end, before = [], 0, -1
    ends = [(turn.start, turn.end, index) for index, turn in enumerate(trajectory.turns) if turn.segment == segment]
    num_tokens = len(trajectory.segments[segment])
    for start, next_end, index in [*ends, (num_tokens, num_tokens, -1)]:
        # Between two actions: the tokens that close a turn for the model are a separate span.
        closed = end if before < 0 else min(start, end + trajectory.turns[before].num_synthesized)
        spans += [
            Span(end, closed, "close", before),
            Span(closed, start, "prompt" if before < 0 else "feedback", before),
            Span(start, next_end, "action", index),
        ]
        end, before = next_end, index
    return [span for span in spans if span.end > span.start]


def messages_of(trajectory: Trajectory) -> list[Message] | None:
    """Return the conversation for readers, with actions as text; None if part of it was raw text, without a role."""
    if isinstance(trajectory.prompt, str):
        return None
    messages = list(trajectory.prompt)
    open_action: str | None = None  # an action before an empty observation: the next action continues it
    for turn in trajectory.turns:
        reply = turn.result.observation if turn.bridge is not None and turn.result is not None else ""
        if reply and isinstance(reply, str) and turn.bridge == "text":
            return None
        open_action = (open_action or "") + turn.action
        if reply:
            new = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
            messages += [{"role": "assistant", "content": open_action}, *new]
            open_action = None
    return messages if open_action is None else [*messages, {"role": "assistant", "content": open_action}]
