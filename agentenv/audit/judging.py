"""From plays to findings: who earned what, and what may not be."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentenv.audit.answers import needles, normal
from agentenv.audit.findings import Finding, Severity, finding, tasks_of
from agentenv.audit.plays import Play
from agentenv.audit.policies import Kind, is_answer
from agentenv.types import Task

_EPS = 1e-6
_MANY_GUESSED, _SOME_GUESSED = 0.9, 0.3
"""Share of the tasks that one blind policy solves: a failure, a warning."""
_MANY_TRIVIAL, _SOME_TRIVIAL = 0.5, 0.2
_TRIVIAL_TEXTS = 4
"""So many of the plain constants, which have nothing in common, solve a task that any text solves."""
_LARGE_PART = 0.5
"""Of what gold earns above an empty action."""
_HALF_PAID, _WELL_PAID = 0.5, 0.9
"""What an empty action may not earn, of the score or of what gold earns: a warning, a failure."""
_SLOW_FACTOR, _SLOW_S = 10.0, 5.0
_MIN_TASKS = 3
"""Shares of fewer tasks say nothing."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Plays, and what is known beside them."""

    plays: Sequence[Play]
    tasks: Mapping[str, Task]
    """Those that were played, by id."""
    kinds: Mapping[str, Kind]
    """Kind of each policy, by name/variant."""
    pass_reward: float | None = None
    """What full marks are where there is no score; None: what gold earns."""
    reward_range: tuple[float, float] | None = None
    by_task: Mapping[str, Sequence[Play]] = field(init=False)
    gold: Mapping[str, Play] = field(init=False)
    trivial: frozenset[str] = field(init=False)
    """Tasks that almost any text solves."""

    def __post_init__(self) -> None:
        """Sort the plays."""
        by_task: dict[str, list[Play]] = defaultdict(list)
        for play in self.plays:
            by_task[play.task_id].append(play)
        object.__setattr__(self, "by_task", dict(by_task))
        object.__setattr__(self, "gold", {play.task_id: play for play in self.plays if play.key == "gold"})
        trivial = [
            task_id
            for task_id, plays in by_task.items()
            if sum(play.policy == "constant" and self.full(play) for play in plays) >= _TRIVIAL_TEXTS
        ]
        object.__setattr__(self, "trivial", frozenset(trivial))

    @property
    def has_scores(self) -> bool:
        """Whether the environment gives scores."""
        return any(play.score is not None for play in self.plays)

    def full(self, play: Play) -> bool:
        """Whether a play has full marks."""
        if play.reward is None:
            return False
        if play.score is not None:
            return play.score >= 1.0 - _EPS
        if self.pass_reward is not None:
            return play.reward >= self.pass_reward - _EPS
        gold, floor = self.gold.get(play.task_id), self.floor(play.task_id)
        if self.has_scores or gold is None or gold.reward is None or (floor is not None and gold.reward <= floor):
            return False
        return play.reward >= gold.reward - _EPS

    def floor(self, task_id: str) -> float | None:
        """What an empty action earns."""
        rewards = [p.reward for p in self.by_task[task_id] if p.policy == "null" and p.reward is not None]
        return max(rewards, default=None)

    def of(self, *kinds: Kind) -> dict[str, list[Play]]:
        """Plays by policy, of these kinds."""
        found: dict[str, list[Play]] = defaultdict(list)
        for play in self.plays:
            if self.kinds[play.key] in kinds:
                found[play.policy].append(play)
        return dict(found)


def judged(facts: Facts) -> list[Finding]:
    """All findings that plays alone show, the leaks and the flaky ones aside."""
    parts: Sequence[Callable[[Facts], list[Finding]]] = (
        _null, _null_pays, _gold, _attacks, _guesses, _trivial, _hedges, _prefixes, _beyond_gold, _errors,
        _ranges, _slow, _forged,
    )  # fmt: skip
    return [each for part in parts for each in part(facts)]


def _null(facts: Facts) -> list[Finding]:
    plays = [play for own in facts.of("empty").values() for play in own if facts.full(play)]
    return [finding("null-earns", "fail", f"{tasks_of(plays)} solved by saying nothing", plays)] if plays else []


def _null_pays(facts: Facts) -> list[Finding]:
    """An empty action without full marks that earns much: all other policies are measured above it."""
    parts = [(play, _paid(facts, play)) for own in facts.of("empty").values() for play in own if not facts.full(play)]
    paid = [play for play, part in parts if part >= _HALF_PAID - _EPS]
    if not paid:
        return []
    most = max(part for _, part in parts)
    severity: Severity = "fail" if most >= _WELL_PAID - _EPS else "warn"
    summary = f"saying nothing earns up to {most:.0%} of the score or of what gold earns, on {tasks_of(paid)}"
    return [finding("null-pays", severity, summary, paid)]


def _paid(facts: Facts, play: Play) -> float:
    """The score of a play, or the part that it earns of gold's reward where that is more; 0 where neither is known."""
    part, gold = play.score or 0.0, facts.gold.get(play.task_id)
    if gold is None or gold.reward is None or gold.reward <= _EPS or play.reward is None or _no_gain(facts, gold):
        return part
    return max(part, play.reward / gold.reward)


def _gold(facts: Facts) -> list[Finding]:
    found = []
    gold, num = list(facts.gold.values()), len(facts.by_task)
    if not gold:
        rated = facts.has_scores or facts.pass_reward is not None
        kind = "no-gold" if rated else "no-ceiling"
        found.append(finding(kind, "note" if rated else "warn", "gold is known for none of the tasks"))
    elif len(gold) < num:
        found.append(finding("gold-partly", "note", f"gold is known for {len(gold)} of {num} tasks"))
    failing = [play for play in gold if not facts.full(play) and _is_rated(facts, play)]
    nothing = [play for play in gold if play not in failing and _no_gain(facts, play)]
    if nothing:
        found.append(finding("no-signal", "fail", f"gold earns nothing on {tasks_of(nothing)}", nothing))
    if failing:
        found.append(finding("gold-fails", "fail", f"gold has no full score on {tasks_of(failing)}", failing))
    return found


def _is_rated(facts: Facts, gold: Play) -> bool:
    """Whether it is known what gold earned; where the row cannot be played, that is another finding."""
    if gold.error is not None:
        return gold.error.where == "gold"
    return gold.score is not None or facts.pass_reward is not None


def _no_gain(facts: Facts, gold: Play) -> bool:
    floor = facts.floor(gold.task_id)
    solved = any(facts.full(play) for play in facts.by_task[gold.task_id] if play.policy == "null")
    return gold.reward is not None and floor is not None and gold.reward <= floor + _EPS and not solved


def _attacks(facts: Facts) -> list[Finding]:
    """Attacks that earn, but for tasks that anything solves and for guesses that are right by chance."""
    found = []
    for policy, plays in facts.of("attack", "robust").items():
        full = [play for play in plays if facts.full(play) and play.task_id not in facts.trivial]
        earning = [play for play in full if not _by_chance(facts, play, full)]
        if earning:
            variants = ", ".join(dict.fromkeys(play.variant or play.policy for play in earning))
            summary = f"{tasks_of(earning)} solved by {policy} ({variants})"
            found.append(finding("hack-earns", "fail", summary, earning, policy=policy))
    return found


def _by_chance(facts: Facts, play: Play, full: Sequence[Play]) -> bool:
    """Whether the action has the answer in it, and earned on no task with another answer."""
    own = _answers(facts, play.task_id)
    said = [normal(step.action) for step in play.steps]
    if not any(answer in text for answer in own for text in said):  # 1.0 may be read as 1, and as 0
        return False
    others = [each for each in full if each.key == play.key and not own & _answers(facts, each.task_id)]
    return not others


def _answers(facts: Facts, task_id: str) -> set[str]:
    return {needle.text for needle in needles(*_of(facts, task_id))}


def _of(facts: Facts, task_id: str) -> tuple[object, str | None]:
    gold = facts.gold.get(task_id)
    return facts.tasks[task_id].label, gold.action if gold is not None else None


def _guesses(facts: Facts) -> list[Finding]:
    """Blind policies that solve much, each by the variant that solves most."""
    found = []
    num = len(facts.by_task)
    for policy, plays in facts.of("blind").items():
        full: dict[str, list[Play]] = defaultdict(list)
        for play in plays:
            if facts.full(play) and play.task_id not in facts.trivial:
                full[play.key].append(play)
        best = max(full.values(), key=len, default=[])
        if not best:
            continue
        share = len(best) / num
        summary = f"{len(best)} of {num} tasks solved by {best[0].key}"
        found.append(finding("guess-earns", _by_share(share, num), summary, best, policy=policy))
    return found


def _by_share(share: float, num: int) -> Severity:
    if num < _MIN_TASKS:
        return "note"
    return "fail" if share >= _MANY_GUESSED else "warn" if share >= _SOME_GUESSED else "note"


def _trivial(facts: Facts) -> list[Finding]:
    if not facts.trivial:
        return []
    plays = [p for p in facts.plays if p.task_id in facts.trivial and p.policy == "constant" and facts.full(p)]
    num = len(facts.by_task)
    share = len(facts.trivial) / num
    severity: Severity = "fail" if share >= _MANY_TRIVIAL else "warn" if share >= _SOME_TRIVIAL else "note"
    if num < _MIN_TASKS:
        severity = "warn" if share == 1.0 else "note"
    return [finding("trivial-tasks", severity, f"{len(facts.trivial)} of {num} tasks solved by almost any text", plays)]


def _hedges(facts: Facts) -> list[Finding]:
    """Right and wrong answers together that earn in either order, where the wrong one alone does not."""
    earned: dict[str, set[str]] = defaultdict(set)
    played: dict[str, set[str]] = defaultdict(set)
    for plays in facts.of("wrong").values():
        for play in plays:
            played[play.task_id].add(play.key)
            if facts.full(play) and len(play.steps) == 1:
                earned[play.task_id].add(play.key)
    both = {"hedge/gold_first", "hedge/gold_last"}
    tasks = [t for t in played if both <= earned[t] and "wrong/changed" in played[t] - earned[t]]
    tasks = [t for t in tasks if t not in facts.trivial and not _solved_later(facts, t)]
    plays = [play for play in facts.plays if play.task_id in tasks and play.key == "hedge/gold_first"]
    return (
        [finding("hedging", "fail", f"{tasks_of(plays)} solved by a right and a wrong answer", plays)] if plays else []
    )


def _prefixes(facts: Facts) -> list[Finding]:
    """The beginning of an answer that earns as the whole does, where the label says that the whole is the answer."""
    plays = [
        play
        for play in facts.plays
        if play.key == "wrong/prefix" and facts.full(play) and play.task_id not in facts.trivial
        if play.task_id in facts.gold and is_answer(facts.gold[play.task_id].action, facts.tasks[play.task_id].label)
    ]
    summary = f"{tasks_of(plays)} solved by the beginning of the answer"
    return [finding("prefix-earns", "fail", summary, plays)] if plays else []


def _solved_later(facts: Facts, task_id: str) -> bool:
    """Whether the wrong answer earned after all, on a later turn."""
    return any(facts.full(play) for play in facts.by_task[task_id] if play.key == "wrong/changed")


def _beyond_gold(facts: Facts) -> list[Finding]:
    """Policies that earn more than gold, or a large part of it, though they have no full marks."""
    found = []
    for policy, plays in facts.of("empty", "blind", "attack", "robust").items():
        own = [(p, facts.gold[p.task_id]) for p in plays if p.task_id in facts.gold and p.task_id not in facts.trivial]
        known = [(p, p.reward, g.reward) for p, g in own if p.reward is not None and g.reward is not None]
        above = [p for p, reward, gold in known if reward > gold + _EPS]
        if above:
            summary = f"{policy} earns more than gold on {tasks_of(above)}"
            found.append(finding("reward-exceeds-gold", "fail", summary, above, policy=policy))
            continue
        part = _part_of_gold(facts, [(p, reward, gold) for p, reward, gold in known if not facts.full(p)])
        if part is not None and part[1] >= _LARGE_PART:
            best = part[0]
            summary = f"{best[0].key} earns {part[1]:.0%} of what gold earns above an empty action"
            found.append(finding("partial-credit", "warn", summary, best, policy=policy))
    return found


def _part_of_gold(facts: Facts, known: Sequence[tuple[Play, float, float]]) -> tuple[list[Play], float] | None:
    """The variant that earns the largest part of gold's gain, in the mean of its tasks, and that part."""
    by_key: dict[str, list[tuple[Play, float]]] = defaultdict(list)
    for play, reward, gold in known:
        floor = facts.floor(play.task_id)
        if floor is not None and gold > floor + _EPS:
            by_key[play.key].append((play, (reward - floor) / (gold - floor)))
    means = [([p for p, _ in parts], statistics.fmean(part for _, part in parts)) for parts in by_key.values()]
    means = [each for each in means if len(each[0]) >= min(_MIN_TASKS, len(facts.by_task))]
    return max(means, key=lambda each: each[1], default=None)


def _errors(facts: Facts) -> list[Finding]:
    found: dict[str, list[Play]] = defaultdict(list)
    for play in facts.plays:
        if play.error is not None and play.error.where != "gold":
            found[_error_kind(play)].append(play)
    severities: dict[str, Severity] = {"infra-error": "warn"}
    return [
        finding(kind, severities.get(kind, "fail"), f"{len(plays)} episodes on {tasks_of(plays)} failed", plays)
        for kind, plays in found.items()
    ]


def _error_kind(play: Play) -> str:
    error = play.error
    if error is None or play.stop_reason == "step_timeout":
        return "step-timeout"
    if error.kind == "infra":
        return "infra-error"
    return "data-error" if error.kind == "data" or error.where in ("create", "reset", "prompt") else "hostile-error"


def _ranges(facts: Facts) -> list[Finding]:
    found = []
    scored = [p for p in facts.plays if any(s.score is not None and not -_EPS <= s.score <= 1 + _EPS for s in p.steps)]
    if scored:
        found.append(finding("score-range", "fail", f"scores outside [0, 1] on {tasks_of(scored)}", scored))
    if facts.reward_range is not None:
        low, high = facts.reward_range
        beyond = [p for p in facts.plays if p.reward is not None and not low - _EPS <= p.reward <= high + _EPS]
        if beyond:
            summary = f"rewards outside [{low:g}, {high:g}] on {tasks_of(beyond)}"
            found.append(finding("reward-range", "fail", summary, beyond))
    return found


def _slow(facts: Facts) -> list[Finding]:
    """Policies that make steps much slower than most are."""
    steps = {key: [s for p in plays for s in p.step_s] for key, plays in _by_key(facts.plays).items()}
    usual = statistics.median([s for own in steps.values() for s in own] or [0.0])
    found: dict[str, list[Play]] = defaultdict(list)
    for play in facts.plays:
        own = statistics.median(steps[play.key] or [0.0])
        if own > max(_SLOW_S, _SLOW_FACTOR * usual) and max(play.step_s, default=0.0) >= own:
            found[play.policy].append(play)
    return [
        finding("slow-steps", "warn", f"{policy} makes steps more than {_SLOW_FACTOR:g} times slower", plays,
                policy=policy)
        for policy, plays in found.items()
    ]  # fmt: skip


def _by_key(plays: Sequence[Play]) -> dict[str, list[Play]]:
    found: dict[str, list[Play]] = defaultdict(list)
    for play in plays:
        found[play.key].append(play)
    return found


def _forged(facts: Facts) -> list[Finding]:
    """Replies with more special tokens than any reply in the same turn to what has none in it."""
    usual: dict[tuple[str, int], int] = {}
    for play in facts.plays:
        if play.policy != "special_tokens":
            for turn, step in enumerate(play.steps):
                usual[play.task_id, turn] = max(step.num_special, usual.get((play.task_id, turn), 0))
    plays = [
        play
        for play in facts.plays
        if play.policy == "special_tokens"
        if any(step.num_special > usual.get((play.task_id, turn), 10**9) for turn, step in enumerate(play.steps))
    ]
    return (
        [finding("forged-tokens", "fail", f"text became special tokens on {tasks_of(plays)}", plays)] if plays else []
    )
