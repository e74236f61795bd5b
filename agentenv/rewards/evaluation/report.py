"""The report of `agentenv rm eval`, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentenv.rewards.evaluation.rewardbench import SECTIONS
from agentenv.rewards.evaluation.tables import AccuracyTable, Delta, Hygiene


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
        blocks += [_hygiene_rows(self.hygiene)]
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


def _hygiene_rows(figures: Hygiene) -> str:
    rows = [
        (name, *(number_text(value, "+.3f") for value in asdict(each).values()))
        for name, each in figures.correlations.items()
    ]
    bias, table = figures.length_bias, table_rows(("score against", "Pearson", "Spearman", "within the prompt"), rows)
    if bias.longer_is_chosen is None:
        return table
    prefers, longer = number_text(bias.prefers_longer), number_text(bias.longer_is_chosen)
    if_longer = number_text(bias.accuracy_where_longer_is_chosen)
    if_shorter = number_text(bias.accuracy_where_shorter_is_chosen)
    line = (
        f"The longer answer scores more in {prefers} of the pairs; it is the chosen one in {longer}. Accuracy if it is "
        f"chosen: {if_longer}; if it is rejected: {if_shorter}. Pairs of equal length are ignored."
    )
    return f"{table}\n\n{line}"


def table_rows(head: Sequence[str], rows: Any) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[" ".join(str(each).replace("|", "\\|").split()) for each in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def number_text(value: float | None, form: str = ".4f") -> str:
    """Return a number as text, `–` for None."""
    return "–" if value is None else f"{value:{form}}"
