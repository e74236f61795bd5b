"""Records of episodes, compared: what is the same whenever an episode is run again, and the first thing that is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest

from agentenv.agent import AgentInstance
from agentenv.trajectory import Trajectory

_TIMES = ("_s", "_ms", "_seconds", "time")
"""How names of measured times end: these differ, as they may."""


def same_number(one: float | None, other: float | None) -> bool:
    """Whether two rewards, or two scores, of the same play differ by rounding at most; None is only None, NaN is NaN.

    A reward model's float32 sums depend on the batch that a conversation is in, which differs from play to play, and
    scorers promise the same within 1e-4 whatever else is in it: less than that says nothing of the environment.
    """
    if one is None or other is None:
        return one is other
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)


def difference(one: Trajectory, other: Trajectory, names: tuple[str, str]) -> str | None:
    """The first fact that two records of the same episode disagree on, in words; None where they do not."""
    for (fact, mine), (other_fact, theirs) in zip_longest(_facts(one), _facts(other), fillvalue=("", None)):
        if fact != other_fact:
            fact, mine, theirs = "number of turns", len(one.turns), len(other.turns)
        if not _same(mine, theirs):
            return f"{fact}: {_brief(mine, theirs)} {names[0]}, {_brief(theirs, mine)} {names[1]}"
    return None


def _same(mine: object, theirs: object) -> bool:
    """Whether a fact is the same: exactly, but for numbers that a model may have computed."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return same_number(mine, theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in mine)
    return mine == theirs


def culprit(found: str, trajectory: Trajectory) -> str:
    """The method that a difference in a record, in words, is the fault of, as far as the record tells."""
    return "step" if trajectory.turns and not found.startswith(("prompt: ", "tools: ")) else "reset"


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
        yield f"{at}: info", {key: _fact(value) for key, value in result.info.items() if not key.endswith(_TIMES)}
    yield "number of turns", len(trajectory.turns)
    yield "tokens", [segment.token_ids.tolist() for segment in trajectory.segments]
    yield "stop reason", str(trajectory.stop_reason)


def _plain(observation: object) -> str:
    return observation if isinstance(observation, str) else repr(observation)


def _fact(value: object) -> str | float:
    return value if isinstance(value, str) else float(value)  # type: ignore[arg-type]


def _brief(value: object, other: object) -> str:
    """A value, from a little before where it parts with the other."""
    mine, theirs = repr(value), repr(other)
    same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    first = max(0, same - 30) if len(mine) > 70 else 0
    return f"{'…' if first else ''}{mine[first : first + 70]}{'…' if first + 70 < len(mine) else ''}"


def own_classes(cls: type[object]) -> list[type[object]]:
    """A class and those that it extends, ours and Python's aside."""
    return [
        base
        for base in cls.__mro__
        if base is not AgentInstance and base.__module__ != "builtins" and not base.__module__.startswith("agentenv.")
    ]
