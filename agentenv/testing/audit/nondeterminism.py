"""Finds rewards and observations that differ when the same actions are repeated."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.findings import AuditFinding, make_finding, tasks_of
from agentenv.testing.conformance.records import same_number


def find_flaky(pairs: Sequence[tuple[Play, Play]]) -> list[AuditFinding]:
    """Return the findings about plays whose repetition differs.

    Args:
        pairs: the first play and its repetition.
    """
    rewards, texts, first_of = [], [], {}
    for first, second in pairs:
        first_of[id(second)] = first
        if _difference(first, second):
            rewards.append(second)
        elif (first.prompt, [s.observation for s in first.steps]) != (
            second.prompt, [s.observation for s in second.steps],
        ):  # fmt: skip
            texts.append(second)
    found = []
    if rewards:
        summary = f"a different reward the second time on {tasks_of(rewards)}"
        detail = lambda play: _difference(first_of[id(play)], play)  # noqa: E731
        found.append(make_finding("flaky-reward", "fail", summary, rewards, detail=detail))
    if texts:
        summary = f"a different observation the second time on {tasks_of(texts)}"
        found.append(make_finding("flaky-observation", "warn", summary, texts))
    return found


def _difference(first: Play, second: Play) -> str:
    """Return the first difference in rewards, scores or the end; empty if there is none."""
    for index, (was, now) in enumerate(zip(first.steps, second.steps, strict=False)):
        for name, one, other in (("reward", was.reward, now.reward), ("score", was.score, now.score)):
            if not same_number(one, other):
                return f"turn {index + 1}: {name} {one!r} the first time, {other!r} the second time"
    if len(first.steps) != len(second.steps):
        return f"{len(first.steps)} turns the first time, {len(second.steps)} the second time"
    if first.stop_reason != second.stop_reason:
        return f"stop reason {first.stop_reason!r} the first time, {second.stop_reason!r} the second time"
    return ""
