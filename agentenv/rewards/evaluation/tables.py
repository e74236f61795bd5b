"""Figures of an evaluation: accuracies by subset, sections and averages, differences from a reference, and hygiene.

`Report` is all of it, as JSON and as Markdown.

Items without a score are counted separately: an accuracy covers the scored items, and is None without any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from agentenv._util.estimates import Estimate, share_over_tasks
from agentenv.core.arguments import number
from agentenv.errors import ConfigError
from agentenv.rewards.evaluation import rewardbench
from agentenv.rewards.evaluation.evaluate import ItemOutcome
from agentenv.rewards.evaluation.rewardbench import SECTIONS, Ties, TiesRow
from agentenv.rewards.evaluation.rows import Item
from agentenv.rewards.hygiene import num_marks, pearson, repeated

Bench = Literal["pairs", "rewardbench", "rewardbench2"]
TOLERANCE = 3.0
"""Items of a subset by which an evaluation may differ from its reference; NeMo RL's published table differs as much."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Subset:
    """Figures of a subset, or of all items."""

    num: int
    failed: int
    """Items without a score; the next fields ignore them."""
    correct: float
    """Right items, with ties credited by the rules."""
    ties: int
    score: float | None
    """`correct` per scored item; RewardBench 2's Ties has its own formula. None if no item has a score."""

    @property
    def judged(self) -> int:
        """Items with scores."""
        return self.num - self.failed


@dataclass(frozen=True, slots=True)
class Delta:
    """A subset compared with the same subset of a reference."""

    reference: float
    score: float | None
    items: float | None
    """Scored items above the reference; None if no item has a score."""
    within: bool


@dataclass(frozen=True, slots=True)
class AccuracyTable:
    """Accuracies of an evaluation."""

    bench: Bench
    ties: Ties
    total: Subset
    accuracy: Estimate
    """Over all scored items, with a 95 % Wilson interval."""
    subsets: Mapping[str, Subset]
    sections: Mapping[str, float | None] = field(default_factory=dict)
    """RewardBench 1's sections; prior sets are one of them if the data has them."""
    average: float | None = None
    """RewardBench 1's leaderboard average over the known sections, or RewardBench 2's mean of subsets."""
    num_truncated: int = 0
    """Answers that were truncated before scoring."""


def bench_of(items: Sequence[Item]) -> Bench:
    """Return the benchmark whose rules apply, recognized by the number of answers or the names of subsets."""
    if any(not item.is_pair for item in items):
        return "rewardbench2"
    known = {*rewardbench.WEIGHTS, *rewardbench.PRIOR_SETS}
    return "rewardbench" if any(item.subset in known for item in items) else "pairs"


def check_bench(bench: Bench | Literal["auto"], items: Sequence[Item]) -> None:
    """Raise an error if a benchmark's rules do not apply to the items.

    Raises:
        ConfigError: RewardBench 2 needs several rejected answers, except in Ties; RewardBench needs its subsets.
    """
    pairs = [each for each in items if each.is_pair and not rewardbench.is_ties_row(each.subset, each.item_id)]
    if bench == "rewardbench2" and pairs:
        raise ConfigError(
            f"--bench rewardbench2: expected rows with several rejected answers, got item {pairs[0].item_id!r} with 1 "
            "and 1. Omit --bench, or set it to pairs."
        )
    subsets = dict.fromkeys(item.subset for item in items)
    if bench == "rewardbench" and not subsets.keys() & {*rewardbench.WEIGHTS, *rewardbench.PRIOR_SETS}:
        raise ConfigError(
            f"--bench rewardbench: expected a subset of RewardBench, got {', '.join(subsets):.200}. Omit --bench."
        )


def credit(outcome: ItemOutcome, bench: Bench, ties: Ties) -> float | None:
    """Return an item's credit in 0..1, None if a score is missing."""
    scores = outcome.known
    if scores is None:
        return None
    if bench != "rewardbench2":
        return rewardbench.pair_credit(scores, outcome.num_chosen, ties)
    if rewardbench.is_ties_row(outcome.subset, outcome.item_id):
        return float(TiesRow(outcome.item_id, scores, outcome.num_chosen).margin > 0)
    return rewardbench.best_of_credit(scores)


def table_of(outcomes: Sequence[ItemOutcome], *, bench: Bench, ties: Ties = "strict") -> AccuracyTable:
    """Return the figures of an evaluation. RewardBench 2 shares an item among equal best answers.

    A row of its Ties subset counts as correct if every right answer beats all wrong ones.
    """
    credits = [credit(outcome, bench, ties) for outcome in outcomes]
    by_subset: dict[str, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        by_subset.setdefault(outcome.subset, []).append(place)
    subsets: dict[str, Subset] = {}
    for name, places in by_subset.items():
        subsets[name] = _total([outcomes[place] for place in places], [credits[place] for place in places])
        rows = [
            TiesRow(outcome.item_id, outcome.known, outcome.num_chosen)
            for outcome in (outcomes[place] for place in places)
            if outcome.known is not None and rewardbench.is_ties_row(outcome.subset, outcome.item_id)
        ]
        if rows and len(rows) == subsets[name].judged:  # Ties has its own formula
            subsets[name] = replace(subsets[name], score=rewardbench.ties_score(rows))
    scores = {name: subset.score for name, subset in subsets.items() if subset.score is not None}
    sections: dict[str, float | None] = {}
    average = None
    if bench == "rewardbench":
        sections, prior = dict(rewardbench.sections(scores)), rewardbench.mean_of(scores, rewardbench.PRIOR_SETS)
        average = rewardbench.leaderboard_average(sections, prior)
        sections |= {"Prior Sets": prior} if prior is not None else {}
    elif bench == "rewardbench2":
        average = rewardbench.mean_of(scores, rewardbench.SUBSETS_2)
    known = [value for value in credits if value is not None]
    return AccuracyTable(
        bench=bench,
        ties=ties,
        total=_total(outcomes, credits),
        accuracy=share_over_tasks(known, len(known)),
        subsets=subsets,
        sections=sections,
        average=average,
        num_truncated=sum(cut for outcome in outcomes for cut in outcome.truncated),
    )


def _total(outcomes: Sequence[ItemOutcome], credits: Sequence[float | None]) -> Subset:
    known = [value for value in credits if value is not None]
    return Subset(
        num=len(outcomes),
        failed=len(outcomes) - len(known),
        correct=math.fsum(known),
        ties=sum(outcome.tie for outcome in outcomes),
        score=fmean(known) if known else None,
    )


# --- a reference ------------------------------------------------------------------------------------------------------


def read_reference(path: str | Path, *, where: str = "--reference") -> dict[str, float]:
    """Return accuracies by subset, from RewardBench's result file or a `report.json`.

    Raises:
        ConfigError: the file is missing or has no accuracies.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: expected a JSON file, got {str(path)!r} ({error}). Check the path.") from error
    rows = content.get("subsets", content) if isinstance(content, dict) else {}
    scores = {
        str(name): row["score"] if isinstance(row, dict) and "score" in row else row
        for name, row in (rows.items() if isinstance(rows, dict) else ())
    }
    known = {
        name: float(value)
        for name, value in scores.items()
        if (isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.01)
    }
    if not known:
        raise ConfigError(f"{where}: expected accuracies in 0..1 by subset, got none in {str(path)!r}. Check it.")
    return known


def deltas(table: AccuracyTable, reference: Mapping[str, float], *, tolerance: float = TOLERANCE) -> dict[str, Delta]:
    """Return the common subsets compared with the reference; `within` means by at most `tolerance` items.

    Raises:
        ConfigError: the evaluations have no common subset.
    """
    most = number("--tolerance", tolerance, low=0.0) + _ROUNDING
    by_subset = {}
    for name, subset in table.subsets.items():
        if name in reference:
            items = None if subset.score is None else (subset.score - reference[name]) * subset.judged
            within = items is not None and abs(items) <= most
            by_subset[name] = Delta(reference[name], subset.score, items, within)
    if not by_subset:
        raise ConfigError(
            f"--reference: expected a subset among {', '.join(table.subsets)}, got {', '.join(reference)}. Use another."
        )
    return by_subset


# --- hygiene ----------------------------------------------------------------------------------------------------------


def features(text: str) -> dict[str, float]:
    """Return features that may bias a reward: characters, Markdown marks, and the share of repeated word 4-grams."""
    return {"length": float(len(text)), "format": float(num_marks(text)), "repetition": repeated(text)}


def correlations(rewards: Sequence[float | None], texts: Sequence[str]) -> dict[str, float | None]:
    """Return the reward's linear correlations with each of `features`; responses without a reward are ignored."""
    rows = [(reward, features(text)) for reward, text in zip(rewards, texts, strict=True) if reward is not None]
    values = [reward for reward, _ in rows]
    return {name: pearson(values, [each[name] for _, each in rows]) for name in features("")}


@dataclass(frozen=True, slots=True)
class LengthBias:
    """How far a preference follows length. A share is None if no pair qualifies."""

    prefers_longer: float | None
    """Share of the pairs that differ in length and score in which the longer answer scores more."""
    longer_is_chosen: float | None
    """Accuracy of always preferring the longer answer, ignoring equal lengths."""
    accuracy_where_longer_is_chosen: float | None
    accuracy_where_shorter_is_chosen: float | None


def length_bias(pairs: Sequence[tuple[float, int]]) -> LengthBias:
    """Return the length bias; equal scores count as wrong.

    Args:
        pairs: of each chosen and rejected answer, by how much the chosen one scores more and is longer, in characters.
    """
    differ = [(margin, longer_by) for margin, longer_by in pairs if longer_by]
    return LengthBias(
        _share(margin * longer_by > 0 for margin, longer_by in differ if margin),
        _share(longer_by > 0 for _, longer_by in differ),
        _share(margin > 0 for margin, longer_by in differ if longer_by > 0),
        _share(margin > 0 for margin, longer_by in differ if longer_by < 0),
    )


def _share(values: Iterable[bool]) -> float | None:
    numbers = [float(value) for value in values]
    return fmean(numbers) if numbers else None


@dataclass(frozen=True, slots=True)
class Hygiene:
    """Biases of the scores."""

    correlations: Mapping[str, float | None]
    """Pearson's, of the score with each of `features`."""
    length_bias: LengthBias
    num_same: int = 0
    """Items with a chosen answer that is also rejected."""
    num_empty: int = 0
    """Items with an empty answer."""

    def markdown(self) -> str:
        """Return them as Markdown: a table of correlations, and a line on length."""
        rows = [(name, number_text(value, "+.3f")) for name, value in self.correlations.items()]
        bias, table = self.length_bias, table_rows(("score against", "Pearson's correlation"), rows)
        if bias.longer_is_chosen is None:
            return table
        prefers, longer = number_text(bias.prefers_longer), number_text(bias.longer_is_chosen)
        if_longer = number_text(bias.accuracy_where_longer_is_chosen)
        if_shorter = number_text(bias.accuracy_where_shorter_is_chosen)
        line = (
            f"The longer answer scores more in {prefers} of the pairs; it is the chosen one in {longer}. Accuracy if "
            f"it is chosen: {if_longer}; if it is rejected: {if_shorter}. Pairs of equal length are ignored."
        )
        return f"{table}\n\n{line}"


def hygiene_of(items: Sequence[Item], outcomes: Sequence[ItemOutcome]) -> Hygiene:
    """Return the hygiene of the scores; the length bias covers the items that are pairs."""
    rewards: list[float | None] = []
    texts: list[str] = []
    pairs: list[tuple[float, int]] = []
    for item, outcome in zip(items, outcomes, strict=True):
        rewards += outcome.scores
        texts += [candidate.text for candidate in item.candidates]
        if item.is_pair and outcome.known is not None:
            chosen, rejected = (len(candidate.text) for candidate in item.candidates)
            pairs.append((outcome.known[0] - outcome.known[1], chosen - rejected))
    return Hygiene(
        correlations(rewards, texts),
        length_bias(pairs),
        num_same=sum(
            any(each in item.candidates[item.num_chosen :] for each in item.candidates[: item.num_chosen])
            for item in items
        ),
        num_empty=sum(any(not each.text.strip() for each in item.candidates) for item in items),
    )


# --- the report of `agentenv rm eval` ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """The report of an evaluation."""

    rm: str
    data: str
    table: AccuracyTable
    hygiene: Hygiene
    deltas: Mapping[str, Delta] = field(default_factory=dict)
    judge: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    """Errors of items without a score, and their counts."""

    @property
    def ok(self) -> bool:
        """Whether every subset matches its reference; True without a reference."""
        return all(delta.within for delta in self.deltas.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON, with the table's fields at the top level."""
        rest = {name: value for name, value in asdict(self).items() if name != "table"}
        return {**asdict(self.table), **rest, "within_reference": self.ok if self.deltas else None}

    def markdown(self) -> str:
        """Return the report as Markdown."""
        rows = [
            (name, each.num, each.failed, f"{each.correct:g}", each.ties, number_text(each.score))
            for name, each in sorted(self.table.subsets.items())
        ]
        blocks = [self._head(), table_rows(("subset", "n", "failed", "correct", "ties", "accuracy"), rows)]
        if self.table.average is not None:
            name = "average of subsets"
            if self.table.bench == "rewardbench":  # the leaderboard's only if all of its sections are known
                known, num = sum(self.table.sections.get(each) is not None for each in SECTIONS), len(SECTIONS)
                name = "leaderboard average" if known == num else f"average of {known} of {num} sections"
            scores = {**self.table.sections, name: self.table.average}
            blocks += [
                table_rows(("section", "score"), [(section, number_text(score)) for section, score in scores.items()])
            ]
        if self.deltas:
            compared = [
                (
                    name,
                    number_text(each.reference),
                    number_text(each.score),
                    "–" if each.items is None else f"{each.items:+.4g}",
                    "yes" if each.within else "NO",
                )
                for name, each in sorted(self.deltas.items())
            ]
            blocks += [table_rows(("subset", "reference", "accuracy", "items", "within"), compared)]
        blocks += [self.hygiene.markdown()]
        blocks += [table_rows(("error", "items"), self.errors.items())] if self.errors else []
        judged = [(name, f"{value:g}") for name, value in self.judge.items() if value]
        blocks += [table_rows(("judge", "figure"), judged)] if judged else []
        return "\n\n".join(blocks) + "\n"

    def _head(self) -> str:
        total, shown = self.table.total, self.table.accuracy
        interval = "" if shown.ci95_low is None else f" (95 %: {shown.ci95_low:.3f} to {shown.ci95_high:.3f})"
        lines = [
            f"# {self.rm} on {self.data}",
            "",
            f"Accuracy {number_text(total.score)}{interval}: {total.correct:g} of {total.judged} items; "
            f"{total.ties} tied (rule: {self.table.ties}). {total.failed} failed and are not counted; "
            f"{self.table.num_truncated} answers were truncated.",
        ]
        compared, flipped = (self.judge.get(f"judge/num_{name}") for name in ("compared", "flipped"))
        if compared and flipped is not None:
            lines += [
                "",
                f"{flipped:g} of {compared:g} verdicts changed with the order of the answers and count as ties: the "
                "judge went by position.",
            ]
        notes = []
        if num := self.hygiene.num_same:
            notes.append(f"{_items(num)} a chosen answer that is rejected too")
        if num := self.hygiene.num_empty:
            notes.append(f"{_items(num)} an empty answer")
        lines += ["", f"Note: {'; '.join(notes)}."] if notes else []
        return "\n".join(lines)


def _items(num: int) -> str:
    return "1 item has" if num == 1 else f"{num} items have"


def table_rows(head: Sequence[str], rows: Any) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[" ".join(str(each).replace("|", "\\|").split()) for each in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def number_text(value: float | None, form: str = ".4f") -> str:
    """Return a number as text, `–` for None."""
    return "–" if value is None else f"{value:{form}}"
