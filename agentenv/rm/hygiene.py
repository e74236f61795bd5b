"""What a reward goes by besides quality, how sure it is, and how it is brought to a scale.

Reports: correlations with length, format and repetition, and how often the longer answer wins; accuracy by the margin
between two scores; how far several reward models disagree. Scaling: a running mean and deviation, or each group's own.
Lists are one value per response, in order; None is a response without a reward, and stays None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from agentenv.errors import ConfigError
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards.repetition import repeated_share
from agentenv.rewards.statistics import summary

_MARKS = re.compile(r"^[ \t]*(?:#{1,6} |[-*+] |\d{1,3}[.)] |```|\|)|\*\*[^*\n]{1,200}\*\*", re.MULTILINE)
_NGRAM = 4
_MAX_CHARS = 100_000


def features(text: str) -> dict[str, float]:
    """What a reward might go by: characters, Markdown marks, and the share of word 4-grams that repeat others."""
    return {
        "length": float(len(text)),
        "format": float(sum(1 for _ in _MARKS.finditer(text[:_MAX_CHARS]))),
        "repetition": repeated_share(text, _NGRAM),
    }


# --- correlations -----------------------------------------------------------------------------------------------------


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The linear correlation, in -1..1; None for fewer than two values, or where one side is all the same.

    Raises:
        ConfigError: the lists are not equally long.
    """
    if len(xs) != len(ys):
        raise ConfigError(f"correlation: expected equally many values, got {len(xs)} and {len(ys)}. Pass pairs.")
    left, right = summary(xs), summary(ys)
    if not left.std or not right.std or left.mean is None or right.mean is None:
        return None
    products = math.fsum(
        (x - left.mean) / left.std * ((y - right.mean) / right.std) for x, y in zip(xs, ys, strict=True)
    )
    return min(max(products / len(xs), -1.0), 1.0)


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


@dataclass(frozen=True, slots=True)
class Correlation:
    """Of the reward with one feature."""

    pearson: float | None
    spearman: float | None
    within_prompt: float | None
    """Spearman's, of what each response has above the mean of its prompt's: which prompts are long has no part in it.
    None where no prompt has two responses."""


def correlations(
    rewards: Sequence[float | None], texts: Sequence[str], prompts: Sequence[Hashable]
) -> dict[str, Correlation]:
    """The reward's correlations with each of `features`; responses without a reward are left out.

    Raises:
        ConfigError: the lists are not equally long.
    """
    if not len(rewards) == len(texts) == len(prompts):
        got = f"{len(rewards)}, {len(texts)} and {len(prompts)}"
        raise ConfigError(f"correlations: expected equally many rewards, texts and prompts, got {got}. Pass them all.")
    kept = [(reward, features(text), prompt) for reward, text, prompt in zip(rewards, texts, prompts, strict=True)
            if reward is not None]  # fmt: skip
    values, groups = [reward for reward, _, _ in kept], [prompt for _, _, prompt in kept]
    found = {}
    for name in features(""):
        column = [each[name] for _, each, _ in kept]
        above = (_above_mean(values, groups), _above_mean(column, groups))
        found[name] = Correlation(pearson(values, column), spearman(values, column), spearman(*above))
    return found


def metrics(
    rewards: Sequence[float | None],
    texts: Sequence[str],
    prompts: Sequence[Hashable],
    *,
    prefix: str = "rewards/hygiene/",
) -> dict[str, float]:
    """The correlations of a batch under flat names, for logs: `rewards/hygiene/length/within_prompt`; known ones only.

    Raises:
        ConfigError: the lists are not equally long.
    """
    return {
        f"{prefix}{feature}/{name}": value
        for feature, correlation in correlations(rewards, texts, prompts).items()
        for name in ("pearson", "spearman", "within_prompt")
        if (value := getattr(correlation, name)) is not None
    }


def _above_mean(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Of the groups with at least two values, each value less its group's mean."""
    members = _members(groups)
    means = {group: fmean(values[place] for place in places) for group, places in members.items()}
    pairs = zip(values, groups, strict=True)
    # To 12 digits: rounding must not order what is equally far from its mean.
    return [float(f"{value - means[group]:.12g}") for value, group in pairs if len(members[group]) > 1]


def _members(groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    return members


# --- pairs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """The scores of a chosen and a rejected answer, and the texts' lengths in characters."""

    chosen: float
    rejected: float
    chosen_length: int
    rejected_length: int

    @property
    def margin(self) -> float:
        """How much the chosen one is ahead."""
        return self.chosen - self.rejected

    @property
    def longer_by(self) -> int:
        """How much longer the chosen one is."""
        return self.chosen_length - self.rejected_length


@dataclass(frozen=True, slots=True)
class LengthBias:
    """How much a preference is one for length; shares are None where there is no such pair."""

    prefers_longer: float | None
    """Of the pairs that differ in length and in score, the share in which the longer one scores more."""
    longer_is_chosen: float | None
    """The accuracy of preferring the longer one, equal lengths left out: what length alone is worth on these data."""
    accuracy_where_longer_is_chosen: float | None
    accuracy_where_shorter_is_chosen: float | None


def length_bias(pairs: Sequence[Pair]) -> LengthBias:
    """The shares; equal scores are wrong."""
    differ = [pair for pair in pairs if pair.longer_by]
    longer, shorter = ([p for p in differ if p.longer_by * sign > 0] for sign in (1, -1))
    return LengthBias(
        _share(pair.margin * pair.longer_by > 0 for pair in differ if pair.margin),
        _share(pair.longer_by > 0 for pair in differ),
        _share(pair.margin > 0 for pair in longer),
        _share(pair.margin > 0 for pair in shorter),
    )


def _share(values: Iterable[bool]) -> float | None:
    found = [float(value) for value in values]
    return fmean(found) if found else None


@dataclass(frozen=True, slots=True)
class MarginBin:
    """Pairs whose scores are about as far apart."""

    low: float
    """Least and largest distance between the two scores."""
    high: float
    num: int
    accuracy: float
    """Share of pairs in which the chosen one is ahead; equal scores count half."""
    predicted: float
    """The mean of 1 / (1 + exp(-distance)), which Bradley and Terry's model takes for the accuracy."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether larger margins are surer ones."""

    bins: tuple[MarginBin, ...]
    error: float | None
    """The expected calibration error: the mean of |accuracy - predicted|, weighed by the pairs; None without any."""


def calibration(margins: Sequence[float], *, num_bins: int = 5) -> Calibration:
    """Accuracy by the distance between the scores, in bins of about equally many pairs.

    Args:
        margins: of each pair, the chosen one's score less the rejected one's.
        num_bins: at most as many.
    """
    count = min(whole_number("calibration.num_bins", num_bins, low=1), len(margins))
    ordered = sorted(margins, key=abs)
    bins = []
    for place in range(count):
        inside = ordered[place * len(ordered) // count : (place + 1) * len(ordered) // count]
        right = fmean(0.5 * ((margin > 0) - (margin < 0)) + 0.5 for margin in inside)
        predicted = fmean(0.5 + 0.5 * math.tanh(abs(margin) / 2) for margin in inside)
        bins.append(MarginBin(abs(inside[0]), abs(inside[-1]), len(inside), right, predicted))
    error = sum(each.num * abs(each.accuracy - each.predicted) for each in bins) / len(margins) if bins else None
    return Calibration(tuple(bins), error)


# --- several reward models --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Of two reward models on the same items."""

    first: str
    second: str
    num: int
    """Items that both have judged."""
    spearman: float | None
    """Of their margins."""
    opposite: float | None
    """Share of the items on which they prefer different answers; where one of them ties, a half."""


def disagreements(margins: Mapping[str, Sequence[float | None]]) -> list[Disagreement]:
    """Every two reward models compared.

    Args:
        margins: by the model's name, of each item the chosen one's score less the rejected one's; None is not known.

    Raises:
        ConfigError: the lists are not equally long.
    """
    found = []
    for (first, left), (second, right) in combinations(margins.items(), 2):
        if len(left) != len(right):
            got = f"{len(left)} of {first} and {len(right)} of {second}"
            raise ConfigError(f"disagreements: expected the same items, got {got}. Evaluate both on the same data.")
        both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
        xs, ys = [a for a, _ in both], [b for _, b in both]
        opposite = fmean(abs(_sign(a) - _sign(b)) / 2 for a, b in both) if both else None
        found.append(Disagreement(first, second, len(both), spearman(xs, ys), opposite))
    return found


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


# --- scaling ----------------------------------------------------------------------------------------------------------


class RunningNorm:
    """Mean and deviation of all numbers so far, by Welford's algorithm, and numbers scaled by them.

    Source: Welford 1962, doi:10.1080/00401706.1962.10490022; parts are joined as in Chan, Golub and LeVeque 1983.

    Args:
        epsilon: added to the deviation.
        clip: most that a scaled number may be away from zero.
    """

    def __init__(self, *, epsilon: float = 1e-6, clip: float | None = None) -> None:
        self._epsilon = number("RunningNorm.epsilon", epsilon, low=0.0)
        self._clip = None if clip is None else number("RunningNorm.clip", clip, low=0.0)
        self.num, self.mean, self._squares = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Of the numbers as the whole population; 0.0 for fewer than two."""
        return math.sqrt(self._squares / self.num) if self.num else 0.0

    def update(self, values: Sequence[float | None]) -> None:
        """Take numbers in."""
        for value in values:
            if value is not None:
                self.num += 1
                away = value - self.mean
                self.mean += away / self.num
                self._squares += away * (value - self.mean)

    def merge(self, other: RunningNorm) -> None:
        """Take in what another one has: the same as all of its numbers."""
        if not other.num:
            return
        total, away = self.num + other.num, other.mean - self.mean
        self._squares += other._squares + away * away * self.num * other.num / total
        self.mean += away * other.num / total
        self.num = total

    def scaled(self, values: Sequence[float | None]) -> list[float | None]:
        """Each number as deviations from the mean; as it is, but clipped, before there are two numbers."""
        mean, std = (self.mean, self.std + self._epsilon) if self.num > 1 else (0.0, 1.0)
        return [
            None if value is None else _clipped((value - mean) / std if std else 0.0, self._clip) for value in values
        ]


def scaled_by_group(
    values: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    divide: bool = True,
    epsilon: float = 1e-6,
    clip: float | None = None,
) -> list[float | None]:
    """Each number less its group's mean and, with `divide`, by the group's deviation; 0.0 where all are the same.

    Raises:
        ConfigError: not one group per value.
    """
    if len(values) != len(groups):
        raise ConfigError(f"groups: expected one for each of {len(values)} values, got {len(groups)}. Pass them all.")
    scaled: list[float | None] = [None] * len(values)
    for places in _members(groups).values():
        known = [(place, value) for place in places if (value := values[place]) is not None]
        figures = summary([value for _, value in known])
        for place, value in known:
            away = value - (figures.mean or 0.0)
            width = (figures.std or 0.0) + epsilon if divide else 1.0
            scaled[place] = _clipped(away / width if away else 0.0, clip)
    return scaled


def _clipped(value: float, clip: float | None) -> float:
    return value if clip is None else min(max(value, -clip), clip)
