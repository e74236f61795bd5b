"""Compares the records of two runs of an episode, and finds the first fact that differs."""

from __future__ import annotations

import math
from typing import Any

from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.testing.diffs import MISSING, changed_facts, facts_of

_TIMES = ("_s", "_ms", "_seconds", "time")
"""Suffixes of the names of measured times in `info`, which may differ."""


def same_number(one: float | None, other: float | None) -> bool:
    """Return True if two rewards or scores of the same actions differ at most by rounding. NaN equals NaN.

    The float32 sums of a reward model depend on the batch of a conversation, which differs from run to run. Scorers
    promise equal results within 1e-4 for any batch, so smaller differences are not the environment's.
    """
    if one is None or other is None:
        return one is other
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)


def difference(one: Trajectory, other: Trajectory, names: tuple[str, str]) -> str | None:
    """Return a description of the first fact that differs between two records of an episode; None if none does."""
    return first_difference(facts_of(one), facts_of(other), names)


def first_difference(one: dict[str, Any], other: dict[str, Any], names: tuple[str, str]) -> str | None:
    """Return a description of the first of two episodes' facts that differs; None if none does."""
    found = next(changed_facts(one, other, _is_same), None)
    if found is None:
        return None
    path, mine, theirs = found
    return f"{path}: {_brief(mine, theirs)} {names[0]}, {_brief(theirs, mine)} {names[1]}"


def _is_same(path: str, mine: Any, theirs: Any) -> bool:
    # Exactly the same, except for numbers that a model may have computed, and measured times.
    if ".info." in path and path.endswith(_TIMES):
        return True
    return isinstance(mine, float) and isinstance(theirs, float) and same_number(mine, theirs)


def culprit(found: str, trajectory: Trajectory | None = None) -> str:
    """Return the method that causes a difference, as far as the record shows; `found` is from `difference`."""
    has_turns = trajectory is None or bool(trajectory.turns)
    return "step" if has_turns and not found.startswith(("prompt", "tools")) else "reset"


def _brief(value: Any, other: Any) -> str:
    """Return a value in short form, from a little before the first difference to the other."""
    mine, theirs = ("nothing" if each is MISSING else repr(each) for each in (value, other))
    same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    first = max(0, same - 30) if len(mine) > 70 else 0
    return f"{'…' if first else ''}{mine[first : first + 70]}{'…' if first + 70 < len(mine) else ''}"


def own_classes(cls: type[object]) -> list[type[object]]:
    """Return a class and its bases, except for those of agentenv and of Python."""
    return [
        base
        for base in cls.__mro__
        if base is not AgentInstance and base.__module__ != "builtins" and not base.__module__.startswith("agentenv.")
    ]
