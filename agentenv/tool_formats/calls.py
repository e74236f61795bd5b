"""What an action says about tools, once it has been parsed: calls, malformed calls, and the text beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be run."""

    name: str
    arguments: Mapping[str, Any]
    """JSON values by the names of the parameters."""
    call_id: str
    """As the action says it, else nine letters and digits that no other call of the episode has."""
    text: str
    """The part of the action that says it."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Something that was meant as a call and is none; it gets an answer that says why."""

    text: str
    """The part of the action that says it."""
    problem: str
    """What is wrong with it, in words that a model can act on."""
    call_id: str
    name: str = ""
    """Of the tool, where that much could be read."""


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """An action: what it says, and what it calls."""

    content: str
    """The text outside of calls, reasoning included as it is."""
    items: tuple[ToolCall | MalformedCall, ...] = ()
    """Every call that was tried, in order."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that can be run."""
        return tuple(item for item in self.items if isinstance(item, ToolCall))

    @property
    def malformed(self) -> tuple[MalformedCall, ...]:
        """Those that cannot."""
        return tuple(item for item in self.items if isinstance(item, MalformedCall))


def call_id(turn_index: int, index: int) -> str:
    """Nine letters and digits (Mistral's templates take nothing else) for the call at `index` of a turn."""
    return f"c{_base36(turn_index)}{_base36(index)}"


def _base36(number: int) -> str:
    digits = ""
    for _ in range(4):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
