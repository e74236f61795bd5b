"""What several environments share: rows, prompts, options and texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentenv.core.agent import ResetState, StepState
from agentenv.core.types import Message
from agentenv.errors import ConfigError
from agentenv.rewards.types import RewardResult

RENDERED = re.compile(r"\s*(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|<(?:s|bos|start_of_turn)>|\[INST\])")
"""How a text begins that a chat template made."""


def check(where: str, value: object, holds: object, expected: str) -> None:
    """Raise ConfigError if an option is not what is expected."""
    if not holds:
        raise ConfigError(f"{where}: expected {expected}, got {value!r:.200}.")


def check_count(where: str, value: object) -> None:
    """Raise ConfigError if an option is not a whole number of at least 1."""
    check(where, value, type(value) is int and value >= 1, "an integer >= 1")


def row_of(states: ResetState | StepState, own: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """Return the label and the other columns; both may be in a label that is an object, as with OpenRLHF.

    A label counts as a whole row if it has some of the environment's `own` columns and the row itself has none of them.
    """
    label, columns = states.get("label"), states.get("metadata") or {}
    whole = label
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            whole = json.loads(label)
        except (ValueError, RecursionError):
            whole = None
    if not isinstance(whole, Mapping) or not set(own) & whole.keys() or set(own) & columns.keys():
        return label, columns
    return whole.get("label"), {**columns, **{name: value for name, value in whole.items() if name != "label"}}


def with_question(states: ResetState, write: Callable[[str], str]) -> ResetState:
    """Return the states with the text that `write` makes of the user's last message.

    A prompt that is text, or that does not end with a user's text, stays as it is.
    """
    messages = states["observation"]
    last: Message = {} if isinstance(messages, str) or not messages else messages[-1]
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        return states
    return {**states, "observation": [*messages[:-1], {**last, "content": write(last["content"])}]}


def texts_of(result: RewardResult) -> dict[str, str]:
    """Return the status of a grade, and its answer, detail and isolation if it has them, for the info of a turn."""
    texts = {"status": result.status.value, "extracted": result.extracted or "", "detail": result.detail}
    texts["isolation"] = result.isolation
    return {name: text for name, text in texts.items() if text}


def attempts_text(left: int) -> str:
    """Return the sentence about the remaining attempts, at least 1."""
    return "1 attempt left." if left == 1 else f"{left} attempts left."
