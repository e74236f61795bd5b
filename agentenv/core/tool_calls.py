"""The parsed tool calls of an action: calls, malformed calls, and the text beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be run."""

    name: str
    arguments: Mapping[str, Any]
    """JSON values by parameter name."""
    call_id: str
    """The id in the action, or else nine letters and digits, unique within the episode."""
    text: str
    """The part of the action that contains the call."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An attempted call that cannot be read; the model gets an answer with the problem."""

    text: str
    """The part of the action that contains the attempt."""
    problem: str
    """What is wrong with it, in words that a model can act on."""
    call_id: str
    name: str = ""
    """The tool's name, if it could be read."""


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """The text and the calls of an action."""

    content: str
    """The text outside of calls; reasoning is included unchanged."""
    items: tuple[ToolCall | MalformedCall, ...] = ()
    """All attempted calls, in order."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that can be run."""
        return tuple(item for item in self.items if isinstance(item, ToolCall))

    @property
    def malformed(self) -> tuple[MalformedCall, ...]:
        """The calls that cannot be read."""
        return tuple(item for item in self.items if isinstance(item, MalformedCall))
