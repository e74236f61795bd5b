"""Rows whose columns may all be in the label, for trainers that pass on only a prompt and a label."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.core.agent import ResetState, StepState


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A row as an environment reads it."""

    label: Any
    columns: Mapping[str, Any]


def row_of(states: ResetState | StepState, own: Sequence[str]) -> TaskRow:
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
        return TaskRow(label, columns)
    return TaskRow(whole.get("label"), {**columns, **{name: value for name, value in whole.items() if name != "label"}})
