"""Finds rewards and observations that differ when the same actions are repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentenv._util.plurals import counted
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.findings import AuditFinding, Severity, findings_of, tasks_of
from agentenv.testing.conformance.records import same_number


def find_flaky(pairs: Sequence[tuple[Play, Play]]) -> list[AuditFinding]:
    """Return the findings about plays whose repetition differs.

    Args:
        pairs: the first play and its repetition.
    """
    rewards, texts, detail = _differing(pairs)
    in_rewards = f"a different reward the second time on {tasks_of(rewards)}"
    in_texts = f"a different observation the second time on {tasks_of(texts)}"
    return [
        *findings_of("flaky-reward", "fail", in_rewards, rewards, detail=detail),
        *findings_of("flaky-observation", "warn", in_texts, texts),
    ]


def find_clock(pairs: Sequence[tuple[Play, Play]], when: str = "at another time of day") -> list[AuditFinding]:
    """Return the finding about plays whose repetition at another time differs.

    Args:
        pairs: the first play and its repetition.
        when: what was different.
    """
    rewards, texts, detail = _differing(pairs)
    severity: Severity = "fail" if rewards else "warn"
    what = "reward" if rewards else "observation"
    summary = f"a different {what} {when} on {tasks_of(rewards or texts)}"
    return findings_of("clock", severity, summary, rewards or texts, detail=detail)


def _differing(pairs: Sequence[tuple[Play, Play]]) -> tuple[list[Play], list[Play], Callable[[Play], str]]:
    """Return the repetitions whose reward or end differs, those whose texts differ, and what describes one of them."""
    rewards, texts = [], []
    for first, second in pairs:
        if _difference(first, second):
            rewards.append(second)
        elif _texts(first) != _texts(second):
            texts.append(second)
    first_of = {id(second): first for first, second in pairs}
    return rewards, texts, lambda play: _difference(first_of[id(play)], play)


def _texts(play: Play) -> tuple[str, list[str]]:
    return play.prompt, [step.observation for step in play.steps]


def _difference(first: Play, second: Play) -> str:
    """Return the first difference in rewards, scores or the end; empty if there is none."""
    for index, (was, now) in enumerate(zip(first.steps, second.steps, strict=False)):
        for name, one, other in (("reward", was.reward, now.reward), ("score", was.score, now.score)):
            if not same_number(one, other):
                return f"turn {index + 1}: {name} {one!r} the first time, {other!r} the second time"
    if len(first.steps) != len(second.steps):
        return f"{counted(len(first.steps), 'turn')} the first time, {len(second.steps)} the second time"
    if first.stop_reason != second.stop_reason:
        return f"stop reason {first.stop_reason!r} the first time, {second.stop_reason!r} the second time"
    return ""
