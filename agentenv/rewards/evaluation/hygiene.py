"""Biases and calibration of rewards.

Correlations with length, format and repetition, and how often the longer answer wins; accuracy by the margin between
two scores; disagreement of several reward models. Lists hold one value per response, in order; None is a response
without a reward. `agentenv.rewards.hygiene` has the figures of a run, `rewards/models/normalise.py` scales rewards.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from agentenv.core.arguments import whole_number
from agentenv.errors import ConfigError
from agentenv.rewards.hygiene import num_marks, pearson, repeated, spearman

_SHARPEST, _HALVINGS = 1e12, 50


def features(text: str) -> dict[str, float]:
    """Return features that may bias a reward: characters, Markdown marks, and the share of repeated word 4-grams."""
    return {
        "length": float(len(text)),
        "format": float(num_marks(text)),
        "repetition": repeated(text),
    }


# --- correlations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Correlation:
    """Correlations of the reward with one feature."""

    pearson: float | None
    spearman: float | None
    within_prompt: float | None
    """Spearman's, of deviations from the mean of each prompt, so that differences between prompts have no effect. None
    if no prompt has two responses."""


def correlations(
    rewards: Sequence[float | None], texts: Sequence[str], prompts: Sequence[Hashable]
) -> dict[str, Correlation]:
    """Return the reward's correlations with each of `features`; responses without a reward are ignored.

    Raises:
        ConfigError: the lists differ in length.
    """
    if not len(rewards) == len(texts) == len(prompts):
        got = f"{len(rewards)}, {len(texts)} and {len(prompts)}"
        raise ConfigError(f"correlations: expected equally many rewards, texts and prompts, got {got}. Pass them all.")
    rows = [
        (reward, features(text), prompt)
        for reward, text, prompt in zip(rewards, texts, prompts, strict=True)
        if reward is not None
    ]
    values = [reward for reward, _, _ in rows]
    groups = [prompt for _, _, prompt in rows]
    by_feature = {}
    for name in features(""):
        column = [each[name] for _, each, _ in rows]
        within = spearman(_deviations(values, groups), _deviations(column, groups))
        by_feature[name] = Correlation(pearson(values, column), spearman(values, column), within)
    return by_feature


def metrics(
    rewards: Sequence[float | None],
    texts: Sequence[str],
    prompts: Sequence[Hashable],
    *,
    prefix: str = "rewards/hygiene/",
) -> dict[str, float]:
    """Return a batch's known correlations under flat names, for logs: `rewards/hygiene/length/within_prompt`.

    Raises:
        ConfigError: the lists differ in length.
    """
    return {
        f"{prefix}{feature}/{name}": value
        for feature, correlation in correlations(rewards, texts, prompts).items()
        for name in ("pearson", "spearman", "within_prompt")
        if (value := getattr(correlation, name)) is not None
    }


def _deviations(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Return each value minus its group's mean, for the groups of two or more values."""
    members: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    means = {group: fmean(values[place] for place in places) for group, places in members.items()}
    pairs = zip(values, groups, strict=True)
    # To 12 digits, so that rounding does not order values with equal deviations.
    return [float(f"{value - means[group]:.12g}") for value, group in pairs if len(members[group]) > 1]


# --- pairs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """The scores and lengths (in characters) of a chosen and a rejected answer."""

    chosen: float
    rejected: float
    chosen_length: int
    rejected_length: int

    @property
    def margin(self) -> float:
        """The chosen answer's score minus the rejected one's."""
        return self.chosen - self.rejected

    @property
    def longer_by(self) -> int:
        """The chosen answer's length minus the rejected one's."""
        return self.chosen_length - self.rejected_length


@dataclass(frozen=True, slots=True)
class LengthBias:
    """How far a preference follows length. A share is None if no pair qualifies."""

    prefers_longer: float | None
    """Share of the pairs that differ in length and score in which the longer answer scores more."""
    longer_is_chosen: float | None
    """Accuracy of always preferring the longer answer, ignoring equal lengths."""
    accuracy_where_longer_is_chosen: float | None
    accuracy_where_shorter_is_chosen: float | None


def length_bias(pairs: Sequence[Pair]) -> LengthBias:
    """Return the length bias; equal scores count as wrong."""
    differ = [pair for pair in pairs if pair.longer_by]
    longer, shorter = ([p for p in differ if p.longer_by * sign > 0] for sign in (1, -1))
    return LengthBias(
        _share(pair.margin * pair.longer_by > 0 for pair in differ if pair.margin),
        _share(pair.longer_by > 0 for pair in differ),
        _share(pair.margin > 0 for pair in longer),
        _share(pair.margin > 0 for pair in shorter),
    )


def _share(values: Iterable[bool]) -> float | None:
    numbers = [float(value) for value in values]
    return fmean(numbers) if numbers else None


@dataclass(frozen=True, slots=True)
class MarginBin:
    """Pairs with similar distances between their scores."""

    low: float
    """Smallest and largest distance between the two scores."""
    high: float
    num: int
    accuracy: float
    """Share of pairs in which the chosen answer scores more; equal scores count half."""
    predicted: float
    """Mean of 1 / (1 + exp(-distance)), the accuracy predicted by the Bradley-Terry model."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Accuracy as a function of the margin. Without pairs, all fields except the bins are None."""

    bins: tuple[MarginBin, ...]
    error: float | None
    """Expected calibration error: mean of |accuracy - predicted|, weighted by the number of pairs."""
    brier: float | None = None
    """Mean of (1 - p)^2, where p is the sigmoid of the margin. A coin toss has 0.25."""
    temperature: float | None = None
    """Divisor that makes the margins most likely; None if there is none, because all pairs are right or accuracy is at
    chance. It is fit on the same pairs, so the next two are slightly worse on other pairs."""
    error_at_temperature: float | None = None
    brier_at_temperature: float | None = None


def calibration(margins: Sequence[float], *, num_bins: int = 5) -> Calibration:
    """Return the accuracy by the distance between scores, in bins of about equal size.

    Source of the temperature: Guo et al. 2017, arXiv:1706.04599, applied to the Bradley-Terry model.

    Args:
        margins: the chosen answer's score minus the rejected one's, per pair.
        num_bins: largest number of bins.
    """
    count = min(whole_number("calibration.num_bins", num_bins, low=1), len(margins))
    ordered = sorted(margins, key=abs)
    bins = _margin_bins(ordered, count)
    result = Calibration(bins, _error(bins), _brier(ordered), _temperature(ordered))
    if result.temperature is None:
        return result
    cooled = [margin / result.temperature for margin in ordered]
    return replace(
        result, error_at_temperature=_error(_margin_bins(cooled, count)), brier_at_temperature=_brier(cooled)
    )


def _margin_bins(ordered: Sequence[float], count: int) -> tuple[MarginBin, ...]:
    bins = []
    for place in range(count):
        inside = ordered[place * len(ordered) // count : (place + 1) * len(ordered) // count]
        right = fmean(0.5 * _sign(margin) + 0.5 for margin in inside)
        predicted = fmean(_sigmoid(abs(margin)) for margin in inside)
        bins.append(MarginBin(abs(inside[0]), abs(inside[-1]), len(inside), right, predicted))
    return tuple(bins)


def _error(bins: Sequence[MarginBin]) -> float | None:
    num = sum(each.num for each in bins)
    return sum(each.num * abs(each.accuracy - each.predicted) for each in bins) / num if num else None


def _brier(margins: Sequence[float]) -> float | None:
    return fmean(_sigmoid(-margin) ** 2 for margin in margins) if margins else None


def _temperature(margins: Sequence[float]) -> float | None:
    """Return the temperature at which the likelihood's slope, which falls monotonically, is 0."""
    largest = max(map(abs, margins), default=0.0)
    if not largest or min(margins) >= 0.0:
        return None
    units = [margin / largest for margin in margins]

    def slope(sharpness: float) -> float:
        return math.fsum(unit * _sigmoid(-sharpness * unit) for unit in units)

    low, high = 0.0, 1.0
    if slope(low) <= 0.0:
        return None
    while slope(high) > 0.0 and high < _SHARPEST:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slope(middle) > 0.0 else (low, middle)
    return largest / high if high < _SHARPEST else None


def _sigmoid(value: float) -> float:
    return 0.5 + 0.5 * math.tanh(value / 2)


# --- several reward models --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The disagreement of two reward models on the same items."""

    first: str
    second: str
    num: int
    """Items that both scored."""
    spearman: float | None
    """Correlation of their margins."""
    opposite: float | None
    """Share of the items on which they prefer different answers; a tie of one of them counts half."""


def disagreements(margins: Mapping[str, Sequence[float | None]]) -> list[Disagreement]:
    """Return the disagreement of each pair of reward models.

    Args:
        margins: by model name, the chosen answer's score minus the rejected one's per item; None is unknown.

    Raises:
        ConfigError: the lists differ in length.
    """
    result = []
    for (first, left), (second, right) in combinations(margins.items(), 2):
        if len(left) != len(right):
            got = f"{len(left)} of {first} and {len(right)} of {second}"
            raise ConfigError(f"disagreements: expected the same items, got {got}. Evaluate both on the same data.")
        both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
        xs, ys = [a for a, _ in both], [b for _, b in both]
        opposite = fmean(abs(_sign(a) - _sign(b)) / 2 for a, b in both) if both else None
        result.append(Disagreement(first, second, len(both), spearman(xs, ys), opposite))
    return result


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
