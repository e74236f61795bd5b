"""What rewards go by besides quality, counted as episodes end: length, format, repetition; and what groups differ by.

Correlations are exact: the same to the last bit in whatever order the pairs come, and memory does not grow with them.
None is what nobody knows: the correlation of one pair, or with a column whose values are all the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from agentenv.errors import ConfigError
from agentenv.estimates import Moments
from agentenv.rewards.repetition import repeated_share

_MARKS = re.compile(r"^[ \t]*(?:#{1,6} |[-*+] |\d{1,3}[.)] |```|\|)|\*\*[^*\n]{1,200}\*\*", re.MULTILINE)
_NGRAM = 4
_MAX_CHARS = 100_000
_UNIT_BITS = 1074
"""Every finite float is a whole number of 2^-1074."""


def num_marks(text: str) -> int:
    """How many Markdown marks a text has: headings, list items, fences, table rows, bold words."""
    return sum(1 for _ in _MARKS.finditer(text[:_MAX_CHARS]))


def repeated(text: str) -> float:
    """The share of a text's word 4-grams that repeat others."""
    return repeated_share(text, _NGRAM)


# --- correlations -----------------------------------------------------------------------------------------------------


class Pairs:
    """Sums over pairs of finite floats, in whole numbers: nothing is rounded before the correlation is asked for."""

    __slots__ = ("_x", "_xx", "_xy", "_y", "_yy", "num")

    def __init__(self) -> None:
        self.num = self._x = self._y = self._xx = self._xy = self._yy = 0

    def add(self, x: float, y: float) -> None:
        """Count a pair."""
        left, right = _whole(x), _whole(y)
        self.num += 1
        self._x, self._y = self._x + left, self._y + right
        self._xx, self._xy, self._yy = self._xx + left * left, self._xy + left * right, self._yy + right * right

    def spread(self) -> tuple[int, int, int]:
        """Squares and products around the means: of x, of both, of y; each times `num`."""
        num, x, y = self.num, self._x, self._y
        return num * self._xx - x * x, num * self._xy - x * y, num * self._yy - y * y

    @property
    def correlation(self) -> float | None:
        """Pearson's, in -1..1; None for fewer than two pairs, or where one side is all the same."""
        return _correlation(*self.spread())


class Within:
    """The correlation of what each pair has above the means of its group, over the pairs of many groups."""

    __slots__ = ("_by_size",)

    def __init__(self) -> None:
        self._by_size: dict[int, tuple[int, int, int]] = {}

    def add(self, group: Pairs) -> None:
        """Count a group; of one pair there is nothing to learn."""
        sums = self._by_size.get(group.num, (0, 0, 0))
        xx, xy, yy = (known + new for known, new in zip(sums, group.spread(), strict=True))
        self._by_size[group.num] = xx, xy, yy

    @property
    def correlation(self) -> float | None:
        """In -1..1; None where no group differs in both."""
        common = math.lcm(*(size for size in self._by_size if size))
        sums = [[part * (common // size) for part in parts] for size, parts in self._by_size.items() if size]
        return _correlation(*(sum(column) for column in zip(*sums, strict=True))) if sums else None


def _whole(value: float) -> int:
    over, under = float(value).as_integer_ratio()
    return over << (_UNIT_BITS + 1 - under.bit_length())  # `under` is a power of two


def _correlation(xx: int, xy: int, yy: int) -> float | None:
    return math.sqrt(xy * xy / (xx * yy)) * (1.0 if xy >= 0 else -1.0) if xx and yy else None


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The linear correlation of two lists; see `Pairs.correlation`.

    Raises:
        ConfigError: the lists are not equally long.
    """
    if len(xs) != len(ys):
        raise ConfigError(f"correlation: expected equally many values, got {len(xs)} and {len(ys)}. Pass pairs.")
    pairs = Pairs()
    for x, y in zip(xs, ys, strict=True):
        pairs.add(x, y)
    return pairs.correlation


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The correlation of the ranks, equal values sharing the mean of theirs; None and errors as `pearson`."""
    return pearson(_ranks(xs), _ranks(ys))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + end - 1) / 2
        start = end
    return ranks


# --- of a run ---------------------------------------------------------------------------------------------------------


class Style(NamedTuple):
    """What a reward might go by, of one episode."""

    length: int
    """Tokens that the policy sampled."""
    format: int
    """See `num_marks`."""
    repetition: float
    """See `repeated`."""


@dataclass(frozen=True, slots=True)
class RewardHygiene:
    """Of the episodes with a reward; a group are the episodes of one task. None where nobody knows.

    What is within groups is what GRPO and its kin can learn from: that long tasks are rewarded more is no part of it.
    """

    length_correlation: float | None
    """Of the reward with the number of action tokens; Pearson's, as the others."""
    length_correlation_in_group: float | None
    format_correlation: float | None
    """Of the reward with the number of Markdown marks in the actions."""
    format_correlation_in_group: float | None
    repetition_correlation: float | None
    """Of the reward with the share of repeated word 4-grams of the actions."""
    repetition_correlation_in_group: float | None
    std_in_group: float | None
    """Mean over the groups of two and more of the rewards' deviation, as whole populations."""
    zero_spread_share: float | None
    """Of those groups, the share in which all rewards are the same: nothing is learned from them."""
    clipped_share: float | None
    """Episodes with a turn whose info has `clipped`, or `…/clipped`, not 0; of those whose info has it."""
    input_truncated_share: float | None
    """The same of `truncated`: a reward model was shown a part of the conversation."""

    def numbers(self) -> dict[str, float]:
        """What is known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class HygieneCounts:
    """What a run's RewardHygiene is made of; what it holds does not grow with the episodes."""

    def __init__(self) -> None:
        self._pairs = {name: Pairs() for name in Style._fields}
        self._within = {name: Within() for name in Style._fields}
        self._stds, self._num_flat = Moments(), 0
        self._flags = {"clipped": Moments(), "truncated": Moments()}

    def add_info(self, info_sum: Mapping[str, float]) -> None:
        """Count the flags of an episode with a reward; `info_sum` as in its Summary."""
        found: dict[str, bool] = {}
        for key, value in info_sum.items():
            if (name := key.rpartition("/")[2]) in self._flags:
                found[name] = found.get(name, False) or value != 0.0
        for name, flag in found.items():
            self._flags[name].add(float(flag))

    def add_group(self, rewards: Sequence[float], styles: Sequence[Style]) -> None:
        """Count the episodes of a group that have a reward; one style for each of them."""
        for index, name in enumerate(Style._fields):
            group = Pairs()
            for reward, style in zip(rewards, styles, strict=True):
                group.add(reward, style[index])
                self._pairs[name].add(reward, style[index])
            if len(rewards) > 1:
                self._within[name].add(group)
        if len(rewards) > 1:
            # Exact, so that neither the order nor the size of the rewards is told for a spread.
            variance = Moments(rewards).variance * (len(rewards) - 1) / len(rewards)
            self._stds.add(math.sqrt(variance))
            self._num_flat += min(rewards) == max(rewards)

    def hygiene(self) -> RewardHygiene:
        """The figures of what was counted."""
        known = {f"{name}_correlation": pairs.correlation for name, pairs in self._pairs.items()}
        known |= {f"{name}_correlation_in_group": within.correlation for name, within in self._within.items()}
        return RewardHygiene(
            **known,
            std_in_group=self._stds.mean,
            zero_spread_share=self._num_flat / self._stds.num if self._stds.num else None,
            clipped_share=self._flags["clipped"].mean,
            input_truncated_share=self._flags["truncated"].mean,
        )
