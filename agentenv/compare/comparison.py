"""`compare`: two runs in, a RunComparison out. Units are tasks; one interval decides, all else describes or checks it.

Sources of each figure are in `intervals.py` and `significance.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from agentenv._util.jsonable import jsonable
from agentenv.compare import intervals, pairing
from agentenv.compare.caveats import Caveat, caveats_of, changed_flags, failures_of
from agentenv.compare.intervals import MeanDifference, Pairing, Precision, Verdict
from agentenv.compare.pairing import Change, EpisodeChange, Flips, Ratio, TaskChange
from agentenv.compare.sides import DRAWS, By, Side, Source, first_and_last, read_side
from agentenv.compare.significance import SignFlips
from agentenv.errors import ConfigError
from agentenv.runs.records.filters import EpisodeFilter, parse_filter


@dataclass(frozen=True, slots=True)
class SideFacts:
    """One of the two runs."""

    name: str
    step: int | None
    """The train step of an evaluation."""
    num_tasks: int
    num_episodes: int
    num_unrewarded: Mapping[str, int]
    """Episodes without a reward, by kind of error or stop reason."""
    num_only: int
    """Tasks that only this run has a value of; they are left out."""
    mean: float
    """Over the compared tasks."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """B against A. Differences are B - A, over the tasks that have a value in both."""

    a: SideFacts
    b: SideFacts
    by: By
    margin: float
    cluster: str | None
    caveats: tuple[Caveat, ...]
    """What makes the runs hard to compare; read it first."""
    changed: Mapping[str, tuple[Any, Any]]
    """Other flags in which the runs differ, with the values in A and in B."""
    has_common_seed: bool
    """True if both runs have the same `--seed` and `--model`: draws may be common, which rightly makes the interval
    narrower. False with `--engine chat`, whose server need not heed the seed, and once a training changed the model."""
    verdict: Verdict
    """What the interval of `difference` shows."""
    difference: MeanDifference
    environments: tuple[Change, ...]
    """The means of each environment of a mixture, by name; empty with fewer than two."""
    are_identical: bool
    """True if no task differs."""
    share_bound: float | None
    """If all tasks differ by the same amount, or none differs: at most this share of such tasks does otherwise, with
    95 % confidence (3 / tasks, the rule of three)."""
    sign_flips: SignFlips
    pairing: Pairing | None
    precision: Precision | None
    smallest_effect: float | None
    """The true difference that this many tasks would show in 80 of 100 comparisons."""
    share_above: Change
    """Probability that an episode of B has a higher value than one of A of the same task, or than the same one if it is
    graded again; `difference` is from 0.5."""
    flips: Flips | None
    """None if it is unknown which episodes passed."""
    passes: tuple[Change, ...]
    """pass@k and pass^k for each k that all tasks have in both runs."""
    lengths: Ratio | None
    """None if the engine counted no tokens."""
    lengths_passed: Ratio | None
    """Of the episodes that passed."""
    cost: Change | None
    """Dollars per episode, for `--prices`; None if no task has them in both runs."""
    stop_reasons: tuple[Change, ...]
    """Share of the episodes by stop reason, the largest change first."""
    info: tuple[Change, ...]
    """Numbers of `StepResult.info`, from the last turn that has them."""
    tasks: tuple[TaskChange, ...]
    """The smallest q first, then the smallest p, then the largest difference."""
    episodes: tuple[EpisodeChange, ...] | None
    """Those whose value changed, the largest change first, if one run is the other graded again, or both are of one;
    otherwise None."""
    num_needed: int | None
    """If a task that changed alone could not be named: the episodes per run with which it could."""

    @property
    def refused(self) -> tuple[Caveat, ...]:
        """The caveats with which no verdict should decide anything."""
        return tuple(each for each in self.caveats if each.refuses)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return dict(jsonable(asdict(self)))


def compare(
    a: Source,
    b: Source | None = None,
    *,
    by: By = "reward",
    where: str | EpisodeFilter | None = None,
    cluster: str | None = None,
    margin: float = 0.0,
) -> RunComparison:
    """Compare run B with run A over the tasks that both have.

    Args:
        a: run directory, of a training also RUN@STEP, for its evaluation at a train step; `.jsonl` file, Run, or
            trajectories.
        b: the same, of the run that may be better. None: the last evaluation of training `a`, against its first.
        by: what to compare: the reward, the score, or whether an episode passed.
        where: a filter of episodes, as for `agentenv show --where`.
        cluster: key of the tasks' metadata; tasks with the same value count as one unit. `env`: a mixture's name.
        margin: smallest difference that matters, in units of `by`.

    Example::

        comparison = compare("runs/base", "runs/new", by="passed")
        assert comparison.verdict != "worse", comparison.difference

    Raises:
        ConfigError: a run or a key is missing, or no task has a value in both.
        DataError: a record has another schema.
    """
    if margin < 0.0:
        raise ConfigError(f"--margin: expected a number >= 0, got {margin:g}.")
    if b is None:
        a, b = first_and_last(str(a))
    kept = parse_filter(where) if isinstance(where, str) else where
    old, new = read_side(a, kept), read_side(b, kept)
    named, by_several = (old, new) if len(new.eval_sets) > 1 else (new, old)
    named.name_sets(by_several)
    environments = {*old.environments.values(), *new.environments.values()}
    for side in (old, new):
        side.keep_entries(environments)
    return compare_sides(old, new, by=by, cluster=cluster, margin=margin)


def compare_sides(a: Side, b: Side, *, by: By, cluster: str | None, margin: float) -> RunComparison:
    """Compare two sides; see `compare`."""
    pairs = pairing.pairs_of(a, b, by, cluster)
    only_a, only_b = pairing.unmatched(a, pairs, by), pairing.unmatched(b, pairs, by)
    means_a, means_b = [fmean(pair.values_a) for pair in pairs], [fmean(pair.values_b) for pair in pairs]
    differences = [pair.difference for pair in pairs]
    values = [value for pair in pairs for value in (*pair.values_a, *pair.values_b)]
    bound = 1.0 if min(values) >= 0.0 and max(values) <= 1.0 else math.inf
    difference = pairing.difference_of(pairs, differences, bound=bound)
    has_no_spread = difference.se == 0.0
    above = [intervals.share_above(pair.compared) for pair in pairs]
    return RunComparison(
        a=_facts(a, means_a, len(only_a)),
        b=_facts(b, means_b, len(only_b)),
        by=by,
        margin=margin,
        cluster=cluster,
        caveats=tuple(caveats_of(a, b, by, pairs=[pair.task_id for pair in pairs], only=(only_a, only_b))),
        changed=changed_flags(a, b),
        has_common_seed=not (a.has_trained or b.has_trained)
        and "chat" not in (a.flags.get("engine"), b.flags.get("engine"))
        and all(a.flags.get(key) is not None and a.flags[key] == b.flags.get(key) for key in DRAWS),
        verdict=intervals.verdict_of(difference, margin),
        difference=difference,
        environments=pairing.environment_changes(
            pairs, a.environments | b.environments, by, margin=margin, bound=bound
        ),
        are_identical=has_no_spread and difference.mean == 0.0,
        share_bound=min(1.0, 3.0 / difference.num_units) if has_no_spread else None,
        sign_flips=pairing.flips_of(pairs, differences),
        pairing=intervals.pairing_of(means_a, means_b),
        precision=intervals.precision_of(difference, [row for pair in pairs for row in pair.independent]),
        smallest_effect=intervals.smallest_effect(difference),
        share_above=pairing.change_of("P(B > A)", pairs, [0.5] * len(pairs), above, bound=0.5),
        flips=pairing.passed_flips(pairs),
        passes=pairing.pass_changes(pairs),
        lengths=pairing.length_ratio(pairs, lambda outcome: True),
        lengths_passed=pairing.length_ratio(pairs, lambda outcome: outcome.passed is True),
        cost=pairing.cost_change(pairs),
        stop_reasons=pairing.stop_changes(pairs),
        info=pairing.info_changes(pairs),
        tasks=pairing.task_changes(pairs),
        episodes=pairing.episode_changes(pairs),
        num_needed=pairing.episodes_needed(pairs),
    )


def _facts(side: Side, means: Sequence[float], num_only: int) -> SideFacts:
    num = sum(map(len, side.outcomes.values()))
    return SideFacts(side.name, side.step, len(side.outcomes), num, failures_of(side), num_only, fmean(means))
