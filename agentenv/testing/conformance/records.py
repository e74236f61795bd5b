"""Compares the records of two runs of an episode, and finds the first fact that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest

from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory

_TIMES = ("_s", "_ms", "_seconds", "time")
"""Suffixes of the names of measured times, which may differ."""


Facts = list[tuple[str, object]]
"""Names and values of what an episode shows."""


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


def first_difference(one: Facts, other: Facts, names: tuple[str, str]) -> str | None:
    """Return a description of the first fact that differs; None if none does."""
    for (fact, mine), (other_fact, theirs) in zip_longest(one, other, fillvalue=("", None)):
        if fact != other_fact:
            fact, mine, theirs = (name := "number of turns"), dict(one)[name], dict(other)[name]
        if not _same(mine, theirs):
            return f"{fact}: {_brief(mine, theirs)} {names[0]}, {_brief(theirs, mine)} {names[1]}"
    return None


def _same(mine: object, theirs: object) -> bool:
    # Exactly the same, except for numbers that a model may have computed.
    if isinstance(mine, float) and isinstance(theirs, float):
        return same_number(mine, theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in mine)
    return mine == theirs


def culprit(found: str, trajectory: Trajectory | None = None) -> str:
    """Return the method that causes a difference, as far as the record shows; `found` is from `difference`."""
    has_turns = trajectory is None or bool(trajectory.turns)
    return "step" if has_turns and not found.startswith(("prompt: ", "tools: ")) else "reset"


def facts_of(trajectory: Trajectory) -> Facts:
    """Return what two records of an episode are compared by, in the order of the episode."""
    return list(_facts(trajectory))


def _facts(trajectory: Trajectory) -> Iterator[tuple[str, object]]:
    yield "prompt", _plain(trajectory.prompt)
    yield "tools", repr(trajectory.tools)
    error = trajectory.error
    yield "error", None if error is None else f"{error.type}: {error.message}"
    for index, turn in enumerate(trajectory.turns):
        result, at = turn.result, f"turn {index + 1}"
        if result is None:
            continue
        yield f"{at}: observation", _plain(result.observation)
        yield f"{at}: reward", result.reward
        yield f"{at}: score", result.score
        yield f"{at}: end", (result.terminated, result.truncated)
        info = {key: value for key, value in result.info.items() if not key.endswith(_TIMES)}
        yield f"{at}: info", {key: value if isinstance(value, str) else float(value) for key, value in info.items()}
    yield "number of turns", len(trajectory.turns)
    yield "tokens", [segment.token_ids.tolist() for segment in trajectory.segments]
    yield "stop reason", str(trajectory.stop_reason)


def _plain(observation: object) -> str:
    return observation if isinstance(observation, str) else repr(observation)


def _brief(value: object, other: object) -> str:
    """Return a value in short form, from a little before the first difference to the other."""
    mine, theirs = repr(value), repr(other)
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
