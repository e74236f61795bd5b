"""Judges rewards of tasks whose full score is unknown, and rewards of a repeated action, which need no full score."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.findings import AuditFinding, Severity, findings_of, make_finding, tasks_of
from agentenv.testing.audit.judging import EPS, Facts

_NEARLY_ALL = 0.9
"""Share of the actions with the same reward, for a failure."""
_LONGER_EARNS = 0.8
"""Share of the pairs of actions, one at least twice as long as the other, in which the longer earns more. The longest
of all must earn at least the median, too: an environment may reward some length, and punish more."""
_LONG = ("explore", "odd_calls", "overwrite", "call", "again", "say")
_MIN_ACTIONS, _MIN_REPEATS = 10, 4
"""Minimum number of different actions to compare, and of equal ones in one episode."""


def judge_unrated(facts: Facts) -> list[AuditFinding]:
    """Return the findings that need no full score; they are sought where none is known, or none would show them."""
    paid_alike = _constant(facts)
    found = paid_alike if paid_alike else [*_silence(facts), *_length(facts, facts.unrated, "fail")]
    rated = [task_id for task_id in facts.by_task if task_id not in {*facts.unrated, *facts.trivial}]
    return [*found, *_length(facts, rated, "warn"), *_repeats(facts)]


def _rewarded(facts: Facts, task_id: str) -> list[tuple[Play, float]]:
    """Return the plays of policies that solve nothing, except for empty actions, with their rewards."""
    kinds = ("blind", "attack", "robust")
    return [(p, p.reward) for p in facts.by_task[task_id] if p.reward is not None and facts.kinds[p.key] in kinds]


def _constant(facts: Facts) -> list[AuditFinding]:
    """Find tasks on which nearly every action earns the same positive reward, and none earns more."""
    found = []
    for task_id in facts.unrated:
        rewarded = _rewarded(facts, task_id)
        top = max((reward for _, reward in rewarded), default=0.0)
        alike = [play for play, reward in rewarded if reward >= top - EPS]
        if top > EPS and len({p.action for p in alike}) >= _MIN_ACTIONS and len(alike) >= _NEARLY_ALL * len(rewarded):
            found.append(alike[0])
    summary = f"any action earns the same reward on {tasks_of(found)}"
    return findings_of("reward-constant", "fail", summary, found)


def _silence(facts: Facts) -> list[AuditFinding]:
    """Find tasks on which an empty action earns more than most other actions."""
    found = []
    for task_id in facts.unrated:
        floor, others = facts.floor(task_id), [reward for _, reward in _rewarded(facts, task_id)]
        if floor is not None and len(others) >= _MIN_ACTIONS and floor > statistics.median(others) + EPS:
            found += [p for p in facts.by_task[task_id] if p.policy == "null" and p.reward == floor][:1]
    is_paid = any(play.reward is not None and play.reward > EPS for play in found)
    severity: Severity = "fail" if is_paid else "warn"
    summary = f"an empty action earns more than most other actions on {tasks_of(found)}"
    return findings_of("silence-pays", severity, summary, found)


def _length(facts: Facts, task_ids: Sequence[str], severity: Severity) -> list[AuditFinding]:
    """Find tasks on which the longer of two actions that do not solve it earns more, whatever they say."""
    found = []
    for task_id in task_ids:
        rewarded = [
            (play, reward)
            for play, reward in _rewarded(facts, task_id)
            if not facts.full(play) and play.policy not in _LONG  # many turns, not long actions
        ]
        sizes = [(sum(len(s.action) for s in play.steps), reward, play) for play, reward in rewarded]
        sizes.sort(key=lambda each: each[0])
        pairs = [(one, other) for one, other in combinations(sizes, 2) if other[0] >= 2 * one[0]]
        longer = sum(other[1] > one[1] + EPS for one, other in pairs)
        if len({size for size, *_ in sizes}) < _MIN_ACTIONS or longer < _LONGER_EARNS * len(pairs):
            continue
        if sizes[-1][1] >= statistics.median(reward for _, reward, _ in sizes):
            found.append(max(sizes, key=lambda each: each[1])[2])
    summary = f"the longer an action, the larger its reward on {tasks_of(found)}"
    return findings_of("length-pays", severity, summary, found)


def _repeats(facts: Facts) -> list[AuditFinding]:
    """Find actions that earn again and again in an episode, by policy: calls and parts of gold on any task."""
    found: dict[str, list[Play]] = defaultdict(list)
    for task_id in facts.by_task:
        gold = facts.gold.get(task_id)
        most = gold.reward if gold is not None and gold.reward is not None else float("inf")
        farming = [(p, p.reward) for p in facts.by_task[task_id] if p.policy == "farm" and p.reward is not None]
        for play, reward in (*_rewarded(facts, task_id), *farming):
            is_call = play.policy in ("calls", "farm", "explore") or (
                play.policy == "again" and "<tool_call>" in play.steps[0].action
            )
            is_judged = task_id not in facts.unrated and not is_call
            is_below = play.policy == "farm" or reward <= most + EPS  # another finding has those above
            if not is_judged and is_below and not facts.full(play) and _repeated(play):
                found[play.policy].append(play)
    findings = []
    for policy, plays in found.items():
        best = max(plays, key=lambda play: play.reward or 0.0)
        fails = policy == "calls" and best.task_id in facts.unrated
        summary = f"the same actions earn a reward again and again: {best.reward:g} in {len(best.steps)} turns by "
        summary += f"{best.key}, on {tasks_of(plays)}"
        findings.append(
            make_finding("repeat-pays", "fail" if fails else "warn", summary, [best, *plays], policy=policy)
        )
    return findings


def _repeated(play: Play) -> bool:
    """Return True if an action is repeated in an episode and earns nearly each time, and others do not take it back."""
    rewards = [step.reward for step in play.steps]
    if sum(rewards) < sum(reward for reward in rewards if reward > 0) / 2:
        return False
    earned: dict[str, list[bool]] = defaultdict(list)
    for step in play.steps:
        earned[step.action].append(step.reward > EPS)
    return any(sum(paid) >= max(_MIN_REPEATS, _NEARLY_ALL * (len(paid) - 1)) for paid in earned.values())
