"""The input of a policy of an audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """The input of a policy before an action."""

    prompt: str
    """The first observation, as text."""
    feedback: str
    """The last observation after an action; empty on the first turn."""
    turn_index: int
    rng: Random
    """Random generator of this episode; equal seeds produce equal actions."""
    room: int
    """Maximum number of tokens of the action."""
    others: Sequence[Any]
    """Labels of the other rows."""
    gold: str | None = None
    """The environment's gold action; only for policies of the kinds gold and wrong."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the environment offers."""
    before: Sequence[str] = ()
    """The actions so far."""
    seen: Sequence[str] = ()
    """The observations so far, without the prompt."""
    turns: int = 8
    """Maximum number of turns of the episode."""
    label: Any = None
    """The label of the row; only for policies of the kinds gold and wrong."""
