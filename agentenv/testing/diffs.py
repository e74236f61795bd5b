"""Explains how two trajectories differ: the first different token, with its facts and its neighbors.

Compared: tokens, masks, log-probabilities, policy versions, rewards, actions, observations and the end. Not compared:
times, cached tokens, ids and attempts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from agentenv._util.jsonable import jsonable
from agentenv.core.engine import Tokenizer
from agentenv.core.trajectory import Segment, Trajectory

_BEFORE, _AFTER = 1, 5
"""Tokens shown around the first that differs, itself among the latter; pytest cuts what is over eight lines."""
_CONTEXT, _WIDEST = 16, 40
"""Tokens of text shown before it and after it, and characters of it."""
_MOST_LINES = 12
"""Maximum number of lines for differences other than tokens."""
MISSING = object()
"""Stands for a value that only the other side has."""


def trajectory_diff(
    left: Trajectory,
    right: Trajectory,
    *,
    tokenizer: Tokenizer | None = None,
    tolerance: float = 1e-6,
    names: tuple[str, str] = ("left", "right"),
) -> list[str]:
    """Return lines that describe how two trajectories differ; an empty list if they are the same.

    Args:
        left: one, called by the first of `names`.
        right: the other.
        tokenizer: decodes tokens; without one there are only ids.
        tolerance: between rewards, scores, log-probabilities and numbers of `info`; NaN equals NaN.
        names: of the two.
    """
    lines = []
    if len(left.segments) != len(right.segments):
        lines.append(_differs("segments", len(left.segments), len(right.segments), names))
    for index, (one, other) in enumerate(zip(left.segments, right.segments, strict=False)):
        found = tokens_diff(one, other, tokenizer=tokenizer, tolerance=tolerance, names=names)
        versions = one.policy_versions, other.policy_versions
        if not found and (at := _first(*versions, 0.0)) is not None:
            values = [repr(side[at]) if at < len(side) else "nothing" for side in versions]
            found = [f"other policy_versions, the first at {at}: {names[0]} {values[0]}, {names[1]} {values[1]}"]
        lines += [f"segment {index}: {found[0]}", *found[1:]] if found else []

    def is_same(path: str, one: Any, other: Any) -> bool:
        return _is_number(one) and _is_number(other) and _close(one, other, tolerance)

    facts = [*changed_facts(facts_of(left), facts_of(right), is_same)]
    shown = [_differs(path, one, other, names) for path, one, other in facts[:_MOST_LINES]]
    more = [f"… and {len(facts) - _MOST_LINES} more"] if len(facts) > _MOST_LINES else []
    return lines + shown + more


def assert_same_trajectory(
    left: Trajectory, right: Trajectory, *, tokenizer: Tokenizer | None = None, tolerance: float = 1e-6
) -> None:
    """Assert that two trajectories are the same in all facts that `trajectory_diff` compares.

    Raises:
        AssertionError: they are not; with the first token that differs, its text around it, and other differences.
    """
    __tracebackhide__ = True
    lines = trajectory_diff(left, right, tokenizer=tokenizer, tolerance=tolerance)
    if lines:
        raise AssertionError("\n".join(["trajectories differ", *lines]))


def tokens_diff(
    left: Segment,
    right: Segment,
    *,
    tokenizer: Tokenizer | None = None,
    tolerance: float = 0.0,
    names: tuple[str, str] = ("left", "right"),
) -> list[str]:
    """Return lines that describe where two segments first differ; an empty list if they are the same.

    Ids are compared first, then masks, rewards and log-probabilities.
    """
    at = _first(left.token_ids, right.token_ids, 0.0)
    if at is not None:
        lengths = " and ".join(str(num) for num in dict.fromkeys((len(left), len(right))))
        return [f"{lengths} tokens, the first that differs is {at}", *_table(left, right, at, tokenizer, names)]
    for name, allowed in (("action_mask", 0.0), ("rewards", tolerance), ("logprobs", tolerance)):
        one, other = getattr(left, name), getattr(right, name)
        if (at := _first(one, other, allowed)) is not None:
            head = f"same tokens, other {name}, the first at {at}: {names[0]} {one[at]!r}, {names[1]} {other[at]!r}"
            return [head, *_table(left, right, at, tokenizer, names)]
    return []


def _first(left: Sequence[float], right: Sequence[float], tolerance: float) -> int | None:
    """Return where two sequences first differ, which may be the end of the shorter one; None if they are the same."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other and not _close(one, other, tolerance):
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance or (one != one and other != other)


def _table(left: Segment, right: Segment, at: int, tokenizer: Tokenizer | None, names: tuple[str, str]) -> list[str]:
    rows = range(max(0, at - _BEFORE), min(max(len(left), len(right)), at + _AFTER))
    cells = [[_cell(side, place, tokenizer) for place in rows] for side in (left, right)]
    widths = [max(map(len, [name, *column])) for name, column in zip(names, cells, strict=True)]
    wide = max(map(len, names))
    sides = [] if tokenizer is None else zip(names, (left, right), strict=True)
    lines = [f"  {name:{wide}}  {_around(side, at, tokenizer)}" for name, side in sides]
    lines.append(f"    index  {names[0]:{widths[0]}}  {names[1]:{widths[1]}}".rstrip())
    for place, one, other in zip(rows, *cells, strict=True):
        mark = ">" if place == at else " "
        lines.append(f"  {mark} {place:5}  {one:{widths[0]}}  {other:{widths[1]}}".rstrip())
    return lines


def _cell(side: Segment, place: int, tokenizer: Tokenizer | None) -> str:
    """Describe a token: its id and text, its log-probability if a policy sampled it, and its reward."""
    if place >= len(side):
        return "(end)"
    parts = [str(side.token_ids[place])]
    if tokenizer is not None:
        parts.append(repr(tokenizer.decode([side.token_ids[place]], skip_special_tokens=False)))
    parts.append(f"action {side.logprobs[place]:.4g}" if side.action_mask[place] else "·")
    if side.rewards[place]:
        parts.append(f"reward {side.rewards[place]:.4g}")
    return " ".join(parts)


def _around(side: Segment, at: int, tokenizer: Tokenizer | None) -> str:
    """Return the text before a token, a mark, and the text from the token on."""
    if tokenizer is None:
        return ""
    before, after = max(0, at - _CONTEXT), min(len(side), at + _CONTEXT)
    ids = side.token_ids.tolist()
    pieces = [tokenizer.decode(each, skip_special_tokens=False) for each in (ids[before:at], ids[at:after])]
    first, last = (repr(piece)[1:-1] for piece in pieces)
    opens = "…" * (before > 0 or len(first) > _WIDEST)
    ends = "…" * (after < len(side) or len(last) > _WIDEST)
    return f"{opens}{first[-_WIDEST:]}⟪here⟫{last[:_WIDEST]}{ends}"


def facts_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the facts that two runs of an episode share, besides the arrays of its segments, as JSON values."""
    error = trajectory.error
    return {
        "prompt": jsonable(trajectory.prompt),
        "tools": jsonable(trajectory.tools),
        "error": error and f"{error.kind} error in {error.where}: {error.type}: {error.message}",
        "turns": [
            {name: getattr(turn, name) for name in _OF_TURN}
            | {"result": turn.result and {name: jsonable(getattr(turn.result, name)) for name in _OF_RESULT}}
            for turn in trajectory.turns
        ],
        "stop_reason": trajectory.stop_reason and trajectory.stop_reason.value,
    }


_OF_TURN = (
    "action", "finish_reason", "matched_stop", "segment", "start", "end", "bridge", "num_synthesized",
    "observation_cut",
)  # fmt: skip
_OF_RESULT = ("observation", "reward", "score", "terminated", "truncated", "info")


def changed_facts(
    left: Any, right: Any, is_same: Callable[[str, Any, Any], bool], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield every path at which two JSON values differ, with both values.

    Args:
        left: one value.
        right: the other.
        is_same: returns True if the values at a path count as the same, though they are not equal.
        path: that of the values.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            where = f"{path}.{key}" if path else str(key)
            yield from changed_facts(left.get(key, MISSING), right.get(key, MISSING), is_same, where)
    elif isinstance(left, list) and isinstance(right, list):
        for at, (one, other) in enumerate(zip_longest(left, right, fillvalue=MISSING)):
            yield from changed_facts(one, other, is_same, f"{path}[{at}]")
    elif left != right and not is_same(path, left, right):
        yield path, left, right


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isinf(value)


def _differs(path: str, left: Any, right: Any, names: tuple[str, str]) -> str:
    shown = ["nothing" if value is MISSING else f"{value!r:.300}" for value in (left, right)]
    if max(map(len, shown)) > 60:
        wide = max(map(len, names))
        sides = [f"\n  {name:{wide}}  {value}" for name, value in zip(names, shown, strict=True)]
        return f"{path}:{''.join(sides)}"
    return f"{path}: {names[0]} {shown[0]}, {names[1]} {shown[1]}"


# --- two runs of an episode -------------------------------------------------------------------------------------------

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

    def is_same(path: str, mine: Any, theirs: Any) -> bool:
        # Exactly the same, except for numbers that a model may have computed, and measured times.
        if ".info." in path and path.endswith(_TIMES):
            return True
        return isinstance(mine, float) and isinstance(theirs, float) and same_number(mine, theirs)

    found = next(changed_facts(one, other, is_same), None)
    if found is None:
        return None
    path, mine, theirs = found
    return f"{path}: {_brief(mine, theirs)} {names[0]}, {_brief(theirs, mine)} {names[1]}"


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
