"""Rows whose columns may all be in the label, for trainers that hand on a prompt and a label only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.agent import ResetState, StepState


@dataclass(frozen=True, slots=True)
class Row:
    """A row as an environment reads it."""

    label: Any
    columns: Mapping[str, Any]


def row_of(states: ResetState | StepState, own: Sequence[str]) -> Row:
    """The label and the other columns; they may all be in a label that is an object, as OpenRLHF has no others.

    It is taken so where it has some of the `own` columns of an environment, and the row itself has none of them.
    """
    label, columns = states.get("label"), states.get("metadata") or {}
    whole = _object(label)
    if whole is None or not set(own) & whole.keys() or set(own) & columns.keys():
        return Row(label, columns)
    return Row(whole.get("label"), {**columns, **{name: value for name, value in whole.items() if name != "label"}})


def _object(label: Any) -> Mapping[str, Any] | None:
    """A label that is an object, or JSON of one."""
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            return None
    return label if isinstance(label, Mapping) else None
