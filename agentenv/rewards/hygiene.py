"""Measure what rewards depend on besides quality, as episodes end: length, marks, repetition, and spread in groups.

None marks what is unknown: the correlation of one pair, or with a column whose values are all equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from agentenv._util.estimates import Moments
from agentenv.rewards.rules.repetition import repeated_share

_MARKS = re.compile(r"^[ \t]*(?:#{1,6} |[-*+] |\d{1,3}[.)] |```|\|)|\*\*[^*\n]{1,200}\*\*", re.MULTILINE)
_NGRAM = 4
_MAX_CHARS = 100_000


def num_marks(text: str) -> int:
    """Return the number of Markdown marks in a text: headings, list items, fences, table rows, bold words."""
    return sum(1 for _ in _MARKS.finditer(text[:_MAX_CHARS]))


def repeated(text: str) -> float:
    """Return the share of a text's word 4-grams that repeat others."""
    return repeated_share(text, _NGRAM)


# --- correlations -----------------------------------------------------------------------------------------------------


class Pairs:
    """Sums over pairs of floats that float32 can hold, one pair at a time. Source: Welford 1962."""

    __slots__ = ("_x", "_xx", "_xy", "_y", "_yy", "num")

    def __init__(self) -> None:
        self.num = 0
        self._x = self._y = 0.0  # means
        self._xx = self._xy = self._yy = 0.0  # squares and products around them

    def add(self, x: float, y: float) -> None:
        """Count a pair."""
        self.num += 1
        away_x, away_y = x - self._x, y - self._y
        self._x += away_x / self.num
        self._y += away_y / self.num
        self._xx += away_x * (x - self._x)
        self._xy += away_x * (y - self._y)
        self._yy += away_y * (y - self._y)

    def add_within(self, group: Pairs) -> None:
        """Count a group's pairs by what each has above the means of its group; do not mix this with `add`."""
        self.num += group.num
        self._xx += group._xx
        self._xy += group._xy
        self._yy += group._yy

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation in [-1, 1]; None for fewer than two pairs, or if one side is constant."""
        if self._xx <= 0.0 or self._yy <= 0.0:
            return None
        return min(1.0, max(-1.0, self._xy / math.sqrt(self._xx) / math.sqrt(self._yy)))


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the linear correlation of two lists of one length in [-1, 1]; None as for `Pairs.correlation`."""
    pairs = Pairs()
    for x, y in zip(xs, ys, strict=True):
        pairs.add(x, y)
    return pairs.correlation


# --- of a run ---------------------------------------------------------------------------------------------------------


class Style(NamedTuple):
    """Properties of one episode that a reward might depend on."""

    length: int | None
    """Tokens that the policy sampled; None if unknown."""
    format: int
    """See `num_marks`."""
    repetition: float
    """See `repeated`."""


@dataclass(frozen=True, slots=True)
class RewardHygiene:
    """Figures of the episodes with a reward; a group is the episodes of one task. None marks what is unknown.

    GRPO and similar algorithms learn only from differences within groups: not from long tasks having higher rewards.
    """

    length_correlation: float | None
    """Pearson's correlation, as the others, of the reward with the number of action tokens."""
    length_correlation_in_group: float | None
    format_correlation: float | None
    """Correlation of the reward with the number of Markdown marks in the actions."""
    format_correlation_in_group: float | None
    repetition_correlation: float | None
    """Correlation of the reward with the share of repeated word 4-grams of the actions."""
    repetition_correlation_in_group: float | None
    std_in_group: float | None
    """Mean over the groups of two and more of the rewards' population standard deviation."""
    zero_spread_share: float | None
    """Share of those groups in which all rewards are equal: nothing is learned from them."""
    clipped_share: float | None
    """Share of the episodes with a turn whose info has `clipped`, or `…/clipped`, not 0, of those whose info has it."""
    input_truncated_share: float | None
    """The same for `truncated`: a reward model saw only a part of the conversation."""

    def numbers(self) -> dict[str, float]:
        """Return the known figures by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class HygieneCounts:
    """Counts that a run's RewardHygiene is computed from; they do not grow with the episodes."""

    def __init__(self) -> None:
        self._pairs = {name: Pairs() for name in Style._fields}
        self._within = {name: Pairs() for name in Style._fields}
        self._stds = Moments()
        self._num_flat = 0
        self._flags = {"clipped": Moments(), "truncated": Moments()}

    def add_info(self, info_sum: Mapping[str, float]) -> None:
        """Count the flags of an episode with a reward; `info_sum` as in its Summary."""
        for name, moments in self._flags.items():
            found = [value for key, value in info_sum.items() if key.rpartition("/")[2] == name]
            if found:
                moments.add(float(any(found)))

    def add_group(self, rewards: Sequence[float], styles: Sequence[Style]) -> None:
        """Count the episodes of a group that have a reward; one style for each of them."""
        for name, values in zip(Style._fields, zip(*styles, strict=True), strict=False):
            group, pairs = Pairs(), self._pairs[name]
            for reward, value in zip(rewards, values, strict=True):
                if value is not None:
                    group.add(reward, value)
                    pairs.add(reward, value)
            self._within[name].add_within(group)
        if len(rewards) > 1:
            variance = Moments(rewards).variance * (len(rewards) - 1) / len(rewards)
            self._stds.add(math.sqrt(variance))
            self._num_flat += min(rewards) == max(rewards)

    def hygiene(self) -> RewardHygiene:
        """Return the figures of what was counted."""
        known = {f"{name}_correlation": pairs.correlation for name, pairs in self._pairs.items()}
        known |= {f"{name}_correlation_in_group": within.correlation for name, within in self._within.items()}
        return RewardHygiene(
            **known,
            std_in_group=self._stds.mean,
            zero_spread_share=self._num_flat / self._stds.num if self._stds.num else None,
            clipped_share=self._flags["clipped"].mean,
            input_truncated_share=self._flags["truncated"].mean,
        )
