"""Pairs of the same task in two runs, and the numbers that are compared over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from agentenv._util.estimates import pass_all_k, pass_at_k
from agentenv._util.suggest import did_you_mean
from agentenv.compare import significance
from agentenv.compare.intervals import MeanDifference, Verdict, cluster_sums, paired_difference, verdict_of
from agentenv.compare.sides import By, EpisodeOutcome, Side, same_episodes, values_of
from agentenv.errors import ConfigError

_NUM_K = 8
"""Up to so many episodes per task, pass@k has every k; beyond, powers of two and the last."""

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class TaskPair:
    """The episodes of a task in both runs, and the values that are compared; at least one in each."""

    task_id: str
    a: Sequence[EpisodeOutcome]
    b: Sequence[EpisodeOutcome]
    values_a: Sequence[float]
    values_b: Sequence[float]
    cluster: Hashable | None = None
    are_same: bool = False
    """True if both runs have the same episodes, in one order: one is the other graded again."""

    @property
    def difference(self) -> float:
        """B - A of the mean values; 0.0 if only rounding tells them apart."""
        a, b = fmean(self.values_a), fmean(self.values_b)
        return 0.0 if _are_equal(a, b) else b - a

    @property
    def compared(self) -> list[tuple[float, float]]:
        """The values that are compared with each other: of each episode, or of each of A with each of B."""
        values = (self.values_a, self.values_b)
        return list(zip(*values, strict=True) if self.are_same else product(*values))

    @property
    def independent(self) -> list[Sequence[float]]:
        """The values in each run, or the differences of the same episodes."""
        return [[b - a for a, b in self.compared]] if self.are_same else [self.values_a, self.values_b]


def _are_equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


@dataclass(frozen=True, slots=True)
class Change:
    """A number of both runs, paired over tasks."""

    name: str
    a: float
    b: float
    difference: MeanDifference
    q: float | None = None
    """From sign flips, by Benjamini-Hochberg over the numbers of its kind; None where each has its own question."""
    verdict: Verdict | None = None
    """What the interval of an environment's mean shows; None for other numbers."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio B / A of the sampled tokens per episode: the geometric mean over tasks, with its 95 % interval."""

    ratio: float
    ci95_low: float | None
    ci95_high: float | None
    num_tasks: int


@dataclass(frozen=True, slots=True)
class Flips:
    """Numbers of tasks that changed between passed and not passed."""

    gained_once: int
    """Passed at least once, in B only."""
    lost_once: int
    gained_always: int
    """Passed in every episode, in B only."""
    lost_always: int
    p: float | None
    """Exact McNemar test; None if tasks have several episodes, of which it would not use most."""


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task in both runs."""

    task_id: str
    num_a: int
    num_b: int
    mean_a: float
    mean_b: float
    difference: float
    p: float | None
    """Fisher's exact test, or a permutation test where a task has more than two values. None for the same episodes,
    graded again: chance has changed none."""
    q: float | None
    """By Benjamini-Hochberg over the tasks."""
    is_named: bool
    """True if q is at most 0.10."""


@dataclass(frozen=True, slots=True)
class EpisodeChange:
    """An episode that was graded again, and its value in both runs."""

    episode_id: str
    task_id: str
    a: float
    b: float


def pairs_of(a: Side, b: Side, by: By, cluster: str | None) -> list[TaskPair]:
    """Return the tasks that have a value in both runs, in the order of their ids, so that no number depends on another.

    Of the same episodes, graded again, those count that have a value in both.

    Raises:
        ConfigError: there are none, or a task has no value of `cluster`.
    """
    pairs, are_same = [], bool(same_episodes(a, b))
    for task_id, row in sorted(a.outcomes.items()):
        old, new = row, b.outcomes.get(task_id, [])
        if are_same:
            old, new = _graded_in_both(old, new, by)
        values_a, values_b = (values_of(each, lambda each: each.value(by)) for each in (old, new))
        if values_a and values_b:
            unit = None if cluster is None else _unit_of(task_id, cluster, [a.metadata, b.metadata])
            pairs.append(TaskPair(task_id, old, new, values_a, values_b, unit, are_same))
    if pairs:
        return pairs
    for side in (a, b):
        if not any(each.value(by) is not None for row in side.outcomes.values() for each in row):
            num = sum(map(len, side.outcomes.values()))
            advice = "Compare by another value." if num else "Run it first."
            if by == "passed" and num:
                advice = "Run it with --pass_score, or compare --by reward."
            raise ConfigError(f"{side.name}: expected episodes with a value of {by}, got none of {num}. {advice}")
    first = [f"{next(iter(side.outcomes))!r}" for side in (a, b)]
    advice = "Compare runs on the same data."
    bare = [{task_id.partition("/")[2] or task_id for task_id in side.outcomes} for side in (a, b)]
    if (a.step is None) != (b.step is None) and not bare[0].isdisjoint(bare[1]):
        advice = (
            "Of a mixture, ids begin with the environment's name in a run and with the set's in an evaluation: "
            "compare two runs, or two evaluations."
        )
    raise ConfigError(
        f"{b.name}: expected tasks of {a.name}, such as {first[0]}, got others, such as {first[1]}. {advice}"
    )


def _graded_in_both(
    a: Sequence[EpisodeOutcome], b: Sequence[EpisodeOutcome], by: By
) -> tuple[list[EpisodeOutcome], list[EpisodeOutcome]]:
    """Return the episodes that have a value in both, in one order."""
    new = {each.episode_id: each for each in b if each.value(by) is not None}
    old = [each for each in a if each.value(by) is not None and each.episode_id in new]
    return old, [new[each.episode_id] for each in old]


def difference_of(
    pairs: Sequence[TaskPair], differences: Sequence[float], *, bound: float = math.inf
) -> MeanDifference:
    """Return the mean of one difference per pair; the units are clusters if the pairs have them."""
    return paired_difference(differences, _clusters(pairs), bound=bound)


def flips_of(pairs: Sequence[TaskPair], differences: Sequence[float]) -> significance.SignFlips:
    """Return the sign-flip test of one difference per pair, or of the sums of clusters."""
    clusters = _clusters(pairs)
    return significance.sign_flips(differences if clusters is None else cluster_sums(differences, clusters))


def _clusters(pairs: Sequence[TaskPair]) -> list[Hashable] | None:
    return [pair.cluster for pair in pairs] if pairs and pairs[0].cluster is not None else None


def _unit_of(task_id: str, cluster: str, metadata: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the value of a key of a task's metadata, which either side has; raise ConfigError if neither does."""
    for side in metadata:
        if cluster in side.get(task_id, {}):
            return str(side[task_id][cluster])
    rows = [row for side in metadata for row in side.values()]
    known = {name for row in rows for name in row}
    advice = did_you_mean(cluster, known, f"There are {', '.join(sorted(known)) or 'no keys'}.")
    if not rows:
        advice = " An evaluation of a training keeps no metadata: compare two runs of the models."
    if cluster in known:
        having, lacking = ({row.get("env", "") for row in rows if (cluster in row) is has} for has in (True, False))
        wanted = " or ".join(f"env={env}" for env in sorted(having - lacking - {""}))
        chosen = f"--where '{wanted}'" if wanted else "--where"
        advice = f" Other tasks have it: compare those alone with {chosen}."
    raise ConfigError(f"--cluster: expected a key of the metadata of task {task_id}, got {cluster!r}.{advice}")


def change_of(
    name: str, pairs: Sequence[TaskPair], means_a: Sequence[float], means_b: Sequence[float], *, bound: float = math.inf
) -> Change:
    """Return how a number changed, from its mean in each pair."""
    differences = [b - a for a, b in zip(means_a, means_b, strict=True)]
    return Change(name, fmean(means_a), fmean(means_b), difference_of(pairs, differences, bound=bound))


def _sides(pairs: Sequence[TaskPair]) -> tuple[list[Sequence[EpisodeOutcome]], list[Sequence[EpisodeOutcome]]]:
    return [pair.a for pair in pairs], [pair.b for pair in pairs]


def _changes_of(
    named: Mapping[str, Sequence[TaskPair]],
    value: Callable[[str, EpisodeOutcome], float | None],
    *,
    bound: float = math.inf,
) -> tuple[Change, ...]:
    """Return how numbers of one kind changed, each by its name over its pairs, with their q-values."""
    changes, ps = [], []
    for name, used in named.items():
        old, new = ([fmean(values_of(row, partial(value, name))) for row in rows] for rows in _sides(used))
        changes.append(change_of(name, used, old, new, bound=bound))
        ps.append(flips_of(used, [b - a for a, b in zip(old, new, strict=True)]).p)
    return tuple(replace(each, q=q) for each, q in zip(changes, significance.benjamini_hochberg(ps), strict=True))


def environment_changes(
    pairs: Sequence[TaskPair], environments: Mapping[str, str], by: By, *, margin: float, bound: float
) -> tuple[Change, ...]:
    """Return how the mean of each environment changed, by name; `environments` has those of the tasks of a mixture."""
    named = {
        env: [pair for pair in pairs if environments.get(pair.task_id) == env]
        for env in sorted({environments[pair.task_id] for pair in pairs if pair.task_id in environments})
    }
    if len(named) < 2:
        return ()
    changes = _changes_of(named, lambda _, each: each.value(by), bound=bound)
    return tuple(replace(each, verdict=verdict_of(each.difference, margin)) for each in changes)


def passed_flips(pairs: Sequence[TaskPair]) -> Flips | None:
    """Return the tasks that flipped; None if it is unknown which episodes passed."""
    rows = [(_passed(pair.a), _passed(pair.b)) for pair in pairs]
    rows = [(a, b) for a, b in rows if a and b]
    if not rows:
        return None
    once, always = Counter((any(a), any(b)) for a, b in rows), Counter((all(a), all(b)) for a, b in rows)
    gained, lost = (False, True), (True, False)
    is_single = all(len(a) == len(b) == 1 for a, b in rows)
    p = significance.mcnemar(once[gained], once[lost]) if is_single else None
    return Flips(once[gained], once[lost], always[gained], always[lost], p)


def _passed(outcomes: Sequence[EpisodeOutcome]) -> list[float]:
    return values_of(outcomes, lambda each: each.value("passed"))


def pass_changes(pairs: Sequence[TaskPair]) -> tuple[Change, ...]:
    """Return pass@k, then pass^k, for each k that all tasks have in both runs."""
    used = [pair for pair in pairs if _passed(pair.a) and _passed(pair.b)]
    known = [[_passed(row) for row in rows] for rows in _sides(used)]
    num = min((len(row) for rows in known for row in rows), default=0)
    ks = [k for k in range(1, num + 1) if num <= _NUM_K or k & (k - 1) == 0 or k == num]
    changes = []
    for name, estimate, first in (("pass@{}", pass_at_k, 1), ("pass^{}", pass_all_k, 2)):  # pass^1 is pass@1
        for k in ks:
            if k >= first:
                old, new = ([estimate(len(row), int(sum(row)), k) for row in rows] for rows in known)
                changes.append(change_of(name.format(k), used, old, new, bound=1.0))
    return tuple(changes)


def length_ratio(pairs: Sequence[TaskPair], counts: Callable[[EpisodeOutcome], bool]) -> Ratio | None:
    """Return the ratio of the sampled tokens of the episodes that count; None without tasks that have some in both."""
    used, logs = [], []
    for pair in pairs:
        a, b = (values_of(filter(counts, row), lambda each: each.num_action_tokens) for row in (pair.a, pair.b))
        if sum(a) and sum(b):
            used.append(pair)
            logs.append(math.log(fmean(b) / fmean(a)))
    if not used:
        return None
    found = difference_of(used, logs)
    low, high = (None if end is None else math.exp(end) for end in (found.ci95_low, found.ci95_high))
    return Ratio(math.exp(found.mean), low, high, len(used))


def cost_change(pairs: Sequence[TaskPair]) -> Change | None:
    """Return how the dollars per episode changed, over the tasks whose cost both runs know; None without any."""
    costs = [[values_of(row, lambda each: each.cost_usd) for row in (pair.a, pair.b)] for pair in pairs]
    known = [(pair, fmean(a), fmean(b)) for pair, (a, b) in zip(pairs, costs, strict=True) if a and b]
    return change_of("policy cost", *zip(*known, strict=True)) if known else None


def stop_changes(pairs: Sequence[TaskPair]) -> tuple[Change, ...]:
    """Return the share of each stop reason, of all episodes of the compared tasks, the largest change first."""
    reasons = sorted({each.stop_reason for pair in pairs for each in (*pair.a, *pair.b)})
    changes = _changes_of(dict.fromkeys(reasons, pairs), lambda name, each: each.stop_reason == name, bound=1.0)
    return tuple(sorted(changes, key=lambda each: -abs(each.difference.mean)))


def info_changes(pairs: Sequence[TaskPair]) -> tuple[Change, ...]:
    """Return the numbers of `StepResult.info` that at least two tasks have in both runs, by name."""
    named = {}
    for name in sorted({name for pair in pairs for each in pair.a for name in each.info}):
        used = [pair for pair in pairs if all(any(name in each.info for each in row) for row in (pair.a, pair.b))]
        if len(used) > 1:
            named[name] = used
    return _changes_of(named, lambda name, each: each.info.get(name))


def task_changes(pairs: Sequence[TaskPair]) -> tuple[TaskChange, ...]:
    """Return each task, the smallest q first, then the smallest p, then the largest difference."""
    ps: Sequence[float | None] = [None] * len(pairs)
    qs = ps
    if not pairs[0].are_same:
        known = [significance.task_p(pair.values_a, pair.values_b) for pair in pairs]
        ps, qs = known, significance.benjamini_hochberg(known)
    changes = [
        TaskChange(
            task_id=pair.task_id,
            num_a=len(pair.values_a),
            num_b=len(pair.values_b),
            mean_a=fmean(pair.values_a),
            mean_b=fmean(pair.values_b),
            difference=pair.difference,
            p=p,
            q=q,
            is_named=q is not None and q <= significance.FALSE_SHARE,
        )
        for pair, p, q in zip(pairs, ps, qs, strict=True)
    ]
    return tuple(sorted(changes, key=lambda each: (each.q or 0.0, each.p or 0.0, -abs(each.difference), each.task_id)))


def episode_changes(pairs: Sequence[TaskPair]) -> tuple[EpisodeChange, ...] | None:
    """Return the episodes whose value changed, the largest change first; None if the runs have different episodes."""
    if not pairs[0].are_same:
        return None
    rows = [
        EpisodeChange(each.episode_id, pair.task_id, a, b)
        for pair in pairs
        for each, (a, b) in zip(pair.a, pair.compared, strict=True)
        if not _are_equal(a, b)
    ]
    return tuple(sorted(rows, key=lambda each: (-abs(each.b - each.a), each.episode_id)))


def episodes_needed(pairs: Sequence[TaskPair]) -> int | None:
    """Return the episodes per run with which a task that changed alone could be named; None if there are enough."""
    if pairs[0].are_same:
        return None
    least = min(significance.smallest_p(len(pair.values_a), len(pair.values_b)) for pair in pairs)
    return significance.num_needed(len(pairs)) if least * len(pairs) > significance.FALSE_SHARE else None


def unmatched(side: Side, pairs: Sequence[TaskPair], by: By) -> list[str]:
    """Return the tasks of a side that have a value and are in no pair, sorted."""
    paired = {pair.task_id for pair in pairs}
    rows = sorted(side.outcomes.items())
    return [task_id for task_id, row in rows if task_id not in paired and any(e.value(by) is not None for e in row)]
