"""What was paid or said otherwise when the same actions were played again."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.audit.findings import Finding, finding, tasks_of
from agentenv.audit.plays import Play
from agentenv.conformance.records import same_number


def flaky(pairs: Sequence[tuple[Play, Play]]) -> list[Finding]:
    """Where the same actions had another outcome.

    Args:
        pairs: the first play, and the same actions again.
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
        summary = f"another reward the second time on {tasks_of(rewards)}"
        detail = lambda play: _difference(first_of[id(play)], play)  # noqa: E731
        found.append(finding("flaky-reward", "fail", summary, rewards, detail=detail))
    if texts:
        summary = f"another observation the second time on {tasks_of(texts)}"
        found.append(finding("flaky-observation", "warn", summary, texts))
    return found


def _difference(first: Play, second: Play) -> str:
    """The first thing that was paid otherwise, both ways, or how the play ended; empty where all is the same."""
    for index, (was, now) in enumerate(zip(first.steps, second.steps, strict=False)):
        for name, one, other in (("reward", was.reward, now.reward), ("score", was.score, now.score)):
            if not same_number(one, other):
                return f"turn {index + 1}: {name} {one!r} the first time, {other!r} the second time"
    if len(first.steps) != len(second.steps):
        return f"{len(first.steps)} turns the first time, {len(second.steps)} the second time"
    if first.stop_reason != second.stop_reason:
        return f"stop reason {first.stop_reason!r} the first time, {second.stop_reason!r} the second time"
    return ""
