"""What `agentenv rm eval` says: a report, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentenv.rm.evaluate import Invariance
from agentenv.rm.hygiene import Calibration
from agentenv.rm.rewardbench import SECTIONS
from agentenv.rm.tables import Delta, Hygiene, Table


@dataclass(frozen=True, slots=True)
class Report:
    """What `agentenv rm eval` writes."""

    rm: str
    data: str
    table: Table
    hygiene: Hygiene
    deltas: Mapping[str, Delta] = field(default_factory=dict)
    invariance: Invariance | None = None
    judge: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    """Why items have no score, and how many of them."""

    @property
    def ok(self) -> bool:
        """Whether every subset is within its reference; True without one."""
        return all(delta.within for delta in self.deltas.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the table's fields on top."""
        rest = {name: value for name, value in asdict(self).items() if name != "table"}
        return {**asdict(self.table), **rest, "within_reference": self.ok if self.deltas else None}

    def markdown(self) -> str:
        """As people read it."""
        blocks = [self._head(), _subset_rows(self.table)]
        blocks += [_section_rows(self.table)] if self.table.average is not None else []
        blocks += [_delta_rows(self.deltas)] if self.deltas else []
        blocks += [_hygiene_rows(self.hygiene)]
        blocks += [_rows(("error", "items"), self.errors.items())] if self.errors else []
        judged = [(name, f"{value:g}") for name, value in self.judge.items() if value]
        blocks += [_rows(("judge", "figure"), judged)] if judged else []
        return "\n\n".join(blocks) + "\n"

    def _head(self) -> str:
        total, shown = self.table.total, self.table.accuracy
        interval = "" if shown.ci95_low is None else f" (95 %: {shown.ci95_low:.3f} to {shown.ci95_high:.3f})"
        lines = [
            f"# {self.rm} on {self.data}",
            "",
            f"Accuracy {_shown(total.score)}{interval}: {total.correct:g} of {total.judged} items; {total.ties} tied "
            f"(rule: {self.table.ties}). {total.failed} failed and are not counted; {self.table.num_truncated} answers "
            "were cut.",
        ]
        if self.invariance is not None:
            lines += ["", _invariance_line(self.invariance)]
        compared, flipped = (self.judge.get(f"judge/num_{name}") for name in ("compared", "flipped"))
        if compared and flipped is not None:
            lines += [
                "",
                f"{flipped:g} of {compared:g} verdicts turned round with the order of the answers, and are ties: the "
                "judge went by the place.",
            ]
        lines += _notes(self.hygiene)
        return "\n".join(lines)


def _notes(found: Hygiene) -> list[str]:
    """What is odd about the data."""
    told = []
    if found.num_same:
        told.append(f"{_items(found.num_same)} a chosen answer that is rejected too")
    if found.num_empty:
        told.append(f"{_items(found.num_empty)} an empty answer")
    return ["", f"Note: {'; '.join(told)}."] if told else []


def _items(num: int) -> str:
    return "1 item has" if num == 1 else f"{num} items have"


def _invariance_line(found: Invariance) -> str:
    if found.max_diff is None:
        return "Batch invariance: not known; nothing could be scored both ways."
    return (
        f"Batch invariance: {found.num} conversations alone and all at once differ by at most {found.max_diff:.2g} "
        f"(scores up to {found.largest:.3g})."
    )


def _subset_rows(table: Table) -> str:
    rows = [
        (name, each.num, each.failed, f"{each.correct:g}", each.ties, _shown(each.score))
        for name, each in sorted(table.subsets.items())
    ]
    return _rows(("subset", "n", "failed", "correct", "ties", "accuracy"), rows)


def _section_rows(table: Table) -> str:
    name = _average_name(table)
    return _rows(("section", "score"), [(n, _shown(s)) for n, s in {**table.sections, name: table.average}.items()])


def _average_name(table: Table) -> str:
    """What the average is: the leaderboard's only where all of its sections are there."""
    if table.bench != "rewardbench":
        return "average of subsets"
    known, num = sum(table.sections.get(name) is not None for name in SECTIONS), len(SECTIONS)
    return "leaderboard average" if known == num else f"average of {known} of {num} sections"


def _delta_rows(found: Mapping[str, Delta]) -> str:
    rows = [
        (
            name, _shown(each.reference), _shown(each.score), "–" if each.items is None else f"{each.items:+.4g}",
            "yes" if each.within else "NO",
        )
        for name, each in sorted(found.items())
    ]  # fmt: skip
    return _rows(("subset", "reference", "accuracy", "items", "within"), rows)


def _hygiene_rows(found: Hygiene) -> str:
    rows = [(name, *map(_signed, asdict(each).values())) for name, each in found.correlations.items()]
    bias, table = found.length_bias, _rows(("score against", "Pearson", "Spearman", "within the prompt"), rows)
    if bias.longer_is_chosen is None:
        return table
    line = (
        f"The longer answer scores more in {_shown(bias.prefers_longer)} of the pairs; it is the chosen one in "
        f"{_shown(bias.longer_is_chosen)}. Accuracy where it is: {_shown(bias.accuracy_where_longer_is_chosen)}; where "
        f"it is not: {_shown(bias.accuracy_where_shorter_is_chosen)}; pairs of equal length are left out."
    )
    if not found.calibration.bins:
        return f"{table}\n\n{line}"
    bins = [
        (f"{each.low:.3g} to {each.high:.3g}", each.num, _shown(each.accuracy), _shown(each.predicted))
        for each in found.calibration.bins
    ]
    sure = _calibration_line(found.calibration)
    return "\n\n".join([table, line, _rows(("margin", "pairs", "accuracy", "predicted"), bins), sure])


def _calibration_line(found: Calibration) -> str:
    line = (
        f"Calibration error {_shown(found.error)} (accuracy against the sigmoid of the margin), Brier score "
        f"{_shown(found.brier)}."
    )
    if found.temperature is None:
        return line
    return (
        f"{line} With margins divided by {found.temperature:.3g}, fit on these pairs: "
        f"{_shown(found.error_at_temperature)} and {_shown(found.brier_at_temperature)}."
    )


def _rows(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"
