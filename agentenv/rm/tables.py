"""Outcomes as figures: accuracies by subset, sections and averages, differences from a reference, and hygiene.

What has no score is counted apart: an accuracy is of the items that could be judged, and None where none could.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from agentenv.errors import ConfigError
from agentenv.estimates import Estimate, share_over_tasks
from agentenv.rewards._arguments import number
from agentenv.rm import hygiene, rewardbench
from agentenv.rm.evaluate import Outcome
from agentenv.rm.rewardbench import Ties, TiesRow
from agentenv.rm.rows import Item

Bench = Literal["pairs", "rewardbench", "rewardbench2"]
TOLERANCE = 3.0
"""Items of a subset by which an evaluation may differ from its reference: as much as NeMo RL's published table does."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Subset:
    """The figures of a subset, or of all items."""

    num: int
    failed: int
    """Items without a score; not in what follows."""
    correct: float
    """Items that were right, with ties by the rules."""
    ties: int
    score: float | None
    """`correct` per judged item; of RewardBench 2's Ties its own formula. None where nothing could be judged."""

    @property
    def judged(self) -> int:
        """Items that have scores."""
        return self.num - self.failed


@dataclass(frozen=True, slots=True)
class Delta:
    """A subset beside the same one of a reference."""

    reference: float
    score: float | None
    items: float | None
    """By how many items of those judged it is above the reference; None where nothing could be judged."""
    within: bool


@dataclass(frozen=True, slots=True)
class Table:
    """An evaluation's accuracies."""

    bench: Bench
    ties: Ties
    total: Subset
    accuracy: Estimate
    """Over all judged items, each counting the same, with a 95 % Wilson interval."""
    subsets: Mapping[str, Subset]
    sections: Mapping[str, float | None] = field(default_factory=dict)
    """RewardBench 1's; prior sets are one where they are in the data."""
    average: float | None = None
    """RewardBench 1's leaderboard average, of the sections that are there, or RewardBench 2's mean of subsets."""
    num_truncated: int = 0
    """Answers that were scored after being cut."""


def bench_of(items: Sequence[Item]) -> Bench:
    """Whose rules the items are for: by several answers, or by the names of the subsets."""
    if any(not item.is_pair for item in items):
        return "rewardbench2"
    known = {*rewardbench.WEIGHTS, *rewardbench.PRIOR_SETS}
    return "rewardbench" if any(item.subset in known for item in items) else "pairs"


def check_bench(bench: Bench | Literal["auto"], items: Sequence[Item]) -> None:
    """Refuse rules that are not for these rows.

    Raises:
        ConfigError: RewardBench 2 is of one chosen answer among several, but for its Ties; RewardBench of its subsets.
    """
    pairs = [each for each in items if each.is_pair and not rewardbench.is_ties_row(each.subset, each.item_id)]
    if bench == "rewardbench2" and pairs:
        raise ConfigError(
            f"--bench rewardbench2: expected rows with several rejected answers, got item {pairs[0].item_id!r} with 1 "
            "and 1. Leave --bench out, or set it to pairs."
        )
    subsets = dict.fromkeys(item.subset for item in items)
    if bench == "rewardbench" and not subsets.keys() & {*rewardbench.WEIGHTS, *rewardbench.PRIOR_SETS}:
        raise ConfigError(
            f"--bench rewardbench: expected a subset of RewardBench, got {', '.join(subsets):.200}. Leave --bench out."
        )


def credit(outcome: Outcome, bench: Bench, ties: Ties) -> float | None:
    """What an item is worth, in 0..1; None where it has no scores."""
    scores = outcome.known
    if scores is None:
        return None
    if bench != "rewardbench2":
        return rewardbench.pair_credit(scores, outcome.num_chosen, ties)
    if rewardbench.is_ties_row(outcome.subset, outcome.item_id):
        return float(TiesRow(outcome.item_id, scores, outcome.num_chosen).margin > 0)
    return rewardbench.best_of_credit(scores)


def table_of(outcomes: Sequence[Outcome], *, bench: Bench, ties: Ties = "strict") -> Table:
    """The figures of an evaluation. RewardBench 2 shares an item among equal best answers, whatever `ties` is.

    A row of its Ties subset counts as correct where every right answer beats all wrong ones.
    """
    credits = [credit(outcome, bench, ties) for outcome in outcomes]
    by_subset: dict[str, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        by_subset.setdefault(outcome.subset, []).append(place)
    subsets = {
        name: _subset([outcomes[place] for place in places], [credits[place] for place in places])
        for name, places in by_subset.items()
    }
    scores = {name: subset.score for name, subset in subsets.items() if subset.score is not None}
    sections: dict[str, float | None] = {}
    average = None
    if bench == "rewardbench":
        sections, prior = dict(rewardbench.sections(scores)), rewardbench.prior_sets(scores)
        average = rewardbench.leaderboard_average(sections, prior)
        sections |= {"Prior Sets": prior} if prior is not None else {}
    elif bench == "rewardbench2":
        average = rewardbench.average_2(scores)
    known = [value for value in credits if value is not None]
    return Table(
        bench=bench,
        ties=ties,
        total=_total(outcomes, credits),
        accuracy=share_over_tasks(known, len(known)),
        subsets=subsets,
        sections=sections,
        average=average,
        num_truncated=sum(cut for outcome in outcomes for cut in outcome.truncated),
    )


def _total(outcomes: Sequence[Outcome], credits: Sequence[float | None]) -> Subset:
    known = [value for value in credits if value is not None]
    return Subset(
        num=len(outcomes),
        failed=len(outcomes) - len(known),
        correct=math.fsum(known),
        ties=sum(outcome.tie for outcome in outcomes),
        score=fmean(known) if known else None,
    )


def _subset(outcomes: Sequence[Outcome], credits: Sequence[float | None]) -> Subset:
    """The figures of a subset; of Ties, where all its rows are of that form, with the score of its own formula."""
    figures = _total(outcomes, credits)
    rows = [
        TiesRow(outcome.item_id, outcome.known, outcome.num_chosen)
        for outcome in outcomes
        if outcome.known is not None and rewardbench.is_ties_row(outcome.subset, outcome.item_id)
    ]
    if not rows or len(rows) < figures.judged:
        return figures
    return Subset(figures.num, figures.failed, figures.correct, figures.ties, rewardbench.ties_score(rows))


# --- a reference ------------------------------------------------------------------------------------------------------


def read_reference(path: str | Path) -> dict[str, float]:
    """The accuracies of a reference by subset: of RewardBench's own result file, or of a `report.json` of ours.

    Raises:
        ConfigError: there is none, or it has no accuracies.
    """
    try:
        found = json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--reference: expected a JSON file, got {str(path)!r} ({error}). Check the path.") from error
    rows = found.get("subsets", found) if isinstance(found, dict) else {}
    scores = {
        str(name): row["score"] if isinstance(row, dict) and "score" in row else row
        for name, row in (rows.items() if isinstance(rows, dict) else ())
    }
    known = {name: float(value) for name, value in scores.items() if _is_share(value)}
    if not known:
        raise ConfigError(f"--reference: expected accuracies in 0..1 by subset, got none in {str(path)!r}. Check it.")
    return known


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.01


def deltas(table: Table, reference: Mapping[str, float], *, tolerance: float = TOLERANCE) -> dict[str, Delta]:
    """Each subset that both have, beside the reference; within it where it differs by at most `tolerance` items.

    Raises:
        ConfigError: they have no subset in common.
    """
    most = number("--tolerance", tolerance, low=0.0) + _ROUNDING
    found = {}
    for name, subset in table.subsets.items():
        if name in reference:
            items = None if subset.score is None else (subset.score - reference[name]) * subset.judged
            within = items is not None and abs(items) <= most
            found[name] = Delta(reference[name], subset.score, items, within)
    if not found:
        raise ConfigError(
            f"--reference: expected a subset among {', '.join(table.subsets)}, got {', '.join(reference)}. Use another."
        )
    return found


# --- hygiene ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hygiene:
    """What the scores go by, and how sure they are."""

    correlations: Mapping[str, hygiene.Correlation]
    length_bias: hygiene.LengthBias
    calibration: hygiene.Calibration
    """Without bins where the scores are verdicts: margins of 1, 0 and -1 say nothing of how sure they are."""
    num_same: int = 0
    """Items with a chosen answer that is also rejected: nothing is to be preferred there."""
    num_empty: int = 0
    """Items with an answer that says nothing."""


def hygiene_of(items: Sequence[Item], outcomes: Sequence[Outcome]) -> Hygiene:
    """The report on scores; bias and calibration are over the pairs among the items."""
    rewards: list[float | None] = []
    texts: list[str] = []
    places: list[int] = []
    pairs: list[hygiene.Pair] = []
    for item, outcome in zip(items, outcomes, strict=True):
        rewards += outcome.scores
        texts += [candidate.text for candidate in item.candidates]
        places += [item.index] * len(item.candidates)
        if item.is_pair and outcome.known is not None:
            chosen, rejected = (len(candidate.text) for candidate in item.candidates)
            pairs.append(hygiene.Pair(outcome.known[0], outcome.known[1], chosen, rejected))
    margins = [pair.margin for pair in pairs]
    return Hygiene(
        hygiene.correlations(rewards, texts, places),
        hygiene.length_bias(pairs),
        hygiene.calibration([] if all(abs(margin) in (0.0, 1.0) for margin in margins) else margins),
        num_same=sum(_is_same(item) for item in items),
        num_empty=sum(any(not each.text.strip() for each in item.candidates) for item in items),
    )


def _is_same(item: Item) -> bool:
    chosen, rejected = item.candidates[: item.num_chosen], item.candidates[item.num_chosen :]
    return any(each in rejected for each in chosen)
