"""Compute IFEval's figures: shares of prompts with all instructions followed, and of instructions, strict and loose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.errors import DataError
from agentenv.rewards.rules.ifeval.instructions import MODES, check_text, instructions_of
from agentenv.rewards.rules.text import final_text

_LABEL_COLUMNS = ("label", "ground_truth")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Number of `total` that were followed; shares are 0.0 if `total` is 0."""

    total: int = 0
    strict: int = 0
    loose: int = 0

    @property
    def strict_share(self) -> float:
        """Share in [0, 1]."""
        return self.strict / self.total if self.total else 0.0

    @property
    def loose_share(self) -> float:
        """Share in [0, 1]."""
        return self.loose / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return counts and shares."""
        shares = {"strict_share": self.strict_share, "loose_share": self.loose_share}
        return {"total": self.total, "strict": self.strict, "loose": self.loose, **shares}


@dataclass(frozen=True, slots=True)
class Judgement:
    """The instructions of one prompt by id, and True for each that the response followed, strict and loose."""

    types: tuple[str, ...]
    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class IFEvalReport:
    """IFEval's figures over many prompts."""

    prompts: Accuracy
    """A prompt counts if all of its instructions are followed."""
    instructions: Accuracy
    groups: Mapping[str, Accuracy]
    """By the first half of an instruction's id, such as `keywords`; in alphabetical order."""
    types: Mapping[str, Accuracy]
    """By instruction id."""
    judgements: tuple[Judgement, ...]
    """One per prompt, in order."""

    def as_dict(self) -> dict[str, Any]:
        """Return the four figures under the usual names of evaluation harnesses, groups and types, as plain JSON."""
        return {
            "prompt_level_strict_acc": self.prompts.strict_share,
            "prompt_level_loose_acc": self.prompts.loose_share,
            "inst_level_strict_acc": self.instructions.strict_share,
            "inst_level_loose_acc": self.instructions.loose_share,
            "num_prompts": self.prompts.total,
            "num_instructions": self.instructions.total,
            "groups": {name: accuracy.as_dict() for name, accuracy in self.groups.items()},
            "types": {name: accuracy.as_dict() for name, accuracy in self.types.items()},
        }

    def table(self) -> str:
        """Return the figures as lines of text: prompts, instructions, then each group above its types."""
        rows = [("prompts", self.prompts), ("instructions", self.instructions)]
        for group, accuracy in self.groups.items():
            rows.append((group, accuracy))
            rows += [(f"  {name}", each) for name, each in self.types.items() if _group_of(name) == group]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':{width}}  number  strict   loose"]
        for name, each in rows:
            lines.append(f"{name:{width}}  {each.total:6d}  {each.strict_share:6.1%}  {each.loose_share:6.1%}")
        return "\n".join(lines)


def report(rows: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> IFEvalReport:
    """Check one response per row; takes about 0.1 ms per instruction, or 5 ms if a language is detected.

    A row has its instructions in its columns, or in `label` or `ground_truth`, in either form; see `instructions_of`.
    Only the text after the thinking counts; a response with unfinished thinking follows nothing.

    Raises:
        DataError: numbers of rows and responses differ, a row cannot be read, or a response is not a text; says which.
        MissingDependency: a text's language must be detected, and langdetect is not installed.
    """
    if len(rows) != len(responses):
        raise DataError(f"responses: expected one for each of {len(rows)} rows, got {len(responses)}. Give all.")
    judgements = tuple(
        _judgement(place, row, text) for place, (row, text) in enumerate(zip(rows, responses, strict=True))
    )
    every = [part for each in judgements for part in zip(each.types, each.strict, each.loose, strict=True)]
    by_type = {
        name: _accuracy([part[1:] for part in every if part[0] == name]) for name in sorted({e[0] for e in every})
    }
    groups = sorted({_group_of(name) for name in by_type})
    return IFEvalReport(
        prompts=_accuracy([(all(each.strict), all(each.loose)) for each in judgements]),
        instructions=_accuracy([part[1:] for part in every]),
        groups={name: _accuracy([part[1:] for part in every if _group_of(part[0]) == name]) for name in groups},
        types=by_type,
        judgements=judgements,
    )


def _judgement(place: int, row: Mapping[str, Any], response: object) -> Judgement:
    if not isinstance(row, Mapping):
        raise DataError(f"rows[{place}]: expected a row by column, got {row!r}. Correct it.")
    if not isinstance(response, str):
        raise DataError(f"responses[{place}]: expected a text, got {response!r}. Leave failed rows out.")
    try:
        label = next((row[name] for name in _LABEL_COLUMNS if row.get(name) is not None), None)
        instructions = instructions_of(label, row)
    except DataError as error:
        raise DataError(f"rows[{place}]: {error}") from error
    text = final_text(response) or ""
    strict, loose = (tuple(check_text(instructions, text, mode)) for mode in MODES)
    return Judgement(tuple(instruction.type for instruction in instructions), strict, loose)


def _accuracy(parts: Sequence[tuple[bool, bool]]) -> Accuracy:
    return Accuracy(len(parts), sum(strict for strict, _ in parts), sum(loose for _, loose in parts))


def _group_of(instruction_type: str) -> str:
    return instruction_type.partition(":")[0]
