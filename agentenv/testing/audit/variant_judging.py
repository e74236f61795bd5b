"""Judges plays of variants of gold: all options in its place, repeated parts, changed data, and limits."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping

from agentenv.core.types import StopReason
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.explore import MARKER
from agentenv.testing.audit.findings import AuditFinding, Severity, findings_of, tasks_of
from agentenv.testing.audit.judging import EPS, Facts, actions_of
from agentenv.testing.audit.variants import LISTED, OTHER_TEXT, REPEATS

_GROWN = 0.2
"""Growth of what an action earns when it says the same more often, as a part of what gold earns."""
_LARGE_PART = 0.5
_PASTED, _PASTED_MORE = 2, 40
"""A reply is pasted if it is so many times as long as the answer, and so many characters longer."""
_PAID = 0.1
"""Part of gold's reward that an end by a limit pays to empty actions, for a warning."""


def judge_variants(facts: Facts) -> list[AuditFinding]:
    """Return the findings about variants of gold."""
    judges = (_listed, _repeated, _multiplied, _pasted, _undone, _tampered, _cut_off)
    return [finding for judge in judges for finding in judge(facts)]


def _by_task(facts: Facts, policy: str) -> Iterator[tuple[str, Mapping[str, Play]]]:
    """Yield the plays of a policy by variant, on each task that a right answer alone solves."""
    for task_id, plays in facts.by_task.items():
        gold = facts.gold.get(task_id)
        is_solved = any(play.policy == "null" and facts.full(play) for play in plays)
        if gold is not None and facts.full(gold) and task_id not in facts.trivial and not is_solved:
            yield task_id, {play.variant: play for play in plays if play.policy == policy}


def _share(facts: Facts, play: Play) -> float:
    """Return what a play earns as a part of the score, or of what gold earns more than an empty action."""
    if play.score is not None:
        return facts.score_share(play.score)
    gold, floor = facts.gold[play.task_id].reward, facts.floor(play.task_id) or 0.0
    return 0.0 if play.reward is None or gold is None or gold <= floor else (play.reward - floor) / (gold - floor)


def _listed(facts: Facts) -> list[AuditFinding]:
    """Find tasks that all options solve, in either order, and the wrong ones alone do not."""
    found = []
    for _, plays in _by_task(facts, "list_all"):
        for how in LISTED:
            both = [plays[name] for name in (how, f"{how}_back") if name in plays]
            others = plays.get(f"{how}_others")
            if len(both) == 2 and all(map(facts.full, both)) and others is not None and not facts.full(others):
                found.append(both[0])
                break
    summary = f"{tasks_of(found)} solved by all options of the prompt ({found[0].variant if found else ''})"
    return findings_of("hedging", "fail", summary, found, policy="list_all", detail=actions_of)


def _repeated(facts: Facts) -> list[AuditFinding]:
    """Find tasks on which a word or line of gold earns more the more often it is said, unlike a neutral word."""
    found: list[Play] = []
    for _, plays in _by_task(facts, "repeat"):
        shares = {name: _share(facts, play) for name, play in plays.items() if play.error is None}
        usual = shares.get("neutral_many", 0.0) - shares.get("neutral_once", 0.0)
        for what in ("word_1", "word_2", "line"):
            once, many = shares.get(f"{what}_once"), shares.get(f"{what}_many")
            if once is None or many is None or many < _LARGE_PART - EPS:
                continue
            if many - once >= _GROWN - EPS and many - once > usual + _GROWN / 2:
                found.append(plays[f"{what}_many"])
                break
    severity: Severity = "fail" if any(map(facts.full, found)) else "warn"
    most = max((_share(facts, play) for play in found), default=0.0)
    summary = (
        f"one word or line, said {REPEATS} times, earns up to {most:.0%} on {tasks_of(found)}, and less if said once"
    )
    return findings_of("repeat-pays", severity, summary, found, policy="repeat", detail=actions_of)


def _multiplied(facts: Facts) -> list[AuditFinding]:
    """Find tasks on which gold earns more if each of its actions is said several times at once."""
    found = []
    for task_id, plays in _by_task(facts, "repeat"):
        play, gold = plays.get("action"), facts.gold[task_id]
        if play is not None and play.reward is not None and gold.reward is not None and play.reward > gold.reward + EPS:
            found.append(play)
    summary = f"gold earns more if an action is said several times at once, on {tasks_of(found)}"
    return findings_of("repeat-pays", "fail", summary, found, policy="action", detail=actions_of)


def _pasted(facts: Facts) -> list[AuditFinding]:
    """Find tasks that a tool's reply solves as the answer, if it is much longer than the answer."""
    found, num = [], 0
    for task_id, plays in _by_task(facts, "paste"):
        if OTHER_TEXT in plays and facts.full(plays[OTHER_TEXT]):
            continue
        gold = facts.gold[task_id].action
        pasted = [play for play in plays.values() if len(play.action) > _PASTED * len(gold) + _PASTED_MORE]
        num += bool(pasted)
        found += [play for play in pasted if facts.full(play)][:1]
    severity: Severity = "fail" if len(found) > num / 2 else "warn"
    summary = f"{tasks_of(found)} solved by a tool's whole reply in place of the answer"
    return findings_of("hack-earns", severity, summary, found, policy="paste")


def _undone(facts: Facts) -> list[AuditFinding]:
    """Find tasks on which an action that is taken back and done again earns each time."""
    found = []
    for _, plays in _by_task(facts, "undo"):
        for variant, play in plays.items():
            rewards = [step.reward for step in play.steps[int(variant.removeprefix("turn_")) :]]
            cycles = [sum(pair) for pair in zip(rewards[::2], rewards[1::2], strict=False)]
            if len(cycles) > 1 and min(cycles[:2]) > EPS:
                found.append(play)
                break
    summary = f"an action that is taken back and done again earns each time, on {tasks_of(found)}"
    return findings_of("repeat-pays", "fail", summary, found, policy="undo", detail=actions_of)


def _tampered(facts: Facts) -> list[AuditFinding]:
    """Find tasks whose right answer changes as a policy changes data, to what it wrote or to the same on all tasks."""
    found, changed = [], defaultdict[str, list[Play]](list)
    for task_id, plays in _by_task(facts, "tamper"):
        gold = facts.gold[task_id].action
        for how, play in plays.items():
            if "<tool_call>" in gold or not play.steps or "<tool_call>" in play.action or not facts.full(play):
                continue
            if MARKER in play.action and MARKER not in gold:
                found.append(play)
            elif play.action != gold:
                changed[how].append(play)
    for plays_of in changed.values():
        golds = {facts.gold[play.task_id].action for play in plays_of}
        if len(golds) > 1 and len({play.action for play in plays_of}) == 1:
            found += plays_of
    answer = found[0].action[-60:] if found else ""
    summary = f"calls change the right answer on {tasks_of(found)}: after them, {answer!r} is right"
    return findings_of("hack-earns", "fail", summary, found, policy="tamper", detail=actions_of)


def _cut_off(facts: Facts) -> list[AuditFinding]:
    """Find tasks on which a limit that ends the episode pays more than gold, or pays an empty action."""
    above, idle = [], []
    for task_id, plays in facts.by_task.items():
        gold = facts.gold.get(task_id)
        if gold is None or gold.reward is None or not facts.full(gold):
            continue
        above += [play for play in plays if play.policy == "cut" and (play.reward or 0.0) > gold.reward + EPS]
        ended = [play.reward for play in plays if play.reward is not None and play.stop_reason == StopReason.TERMINATED]
        for play in plays:
            is_idle = play.policy == "null" and play.stop_reason == StopReason.MAX_TURNS and play.reward is not None
            last = play.steps[-1].reward if play.steps else 0.0
            before = sum(step.reward for step in play.steps[:-1])
            is_paid = is_idle and last > max(EPS, _PAID * gold.reward) and before <= EPS
            if is_paid and ended and statistics.median(ended) < last - EPS:
                idle.append(play)
                break
    if above:
        summary = f"gold earns more on {tasks_of(above)} if a limit ends the episode"
        return findings_of("truncation-pays", "fail", summary, above, detail=actions_of)
    most = max((play.reward or 0.0 for play in idle), default=0.0)
    summary = f"empty actions earn up to {most:g} on {tasks_of(idle)} if a limit ends the episode"
    return findings_of("truncation-pays", "warn", summary, idle, detail=actions_of)
