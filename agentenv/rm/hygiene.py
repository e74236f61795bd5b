"""What a reward goes by besides quality, and how sure it is.

Correlations with length, format and repetition, and how often the longer answer wins; accuracy by the margin between
two scores; how far several reward models disagree. Lists are one value per response, in order; None is a response
without a reward. `reward_hygiene.py` has the same of a run, `rewards/models/normalise.py` brings rewards to a scale.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from agentenv.errors import ConfigError
from agentenv.reward_hygiene import num_marks, pearson, repeated, spearman
from agentenv.rewards._arguments import whole_number

_SHARPEST, _HALVINGS = 1e12, 50


def features(text: str) -> dict[str, float]:
    """What a reward might go by: characters, Markdown marks, and the share of word 4-grams that repeat others."""
    return {
        "length": float(len(text)),
        "format": float(num_marks(text)),
        "repetition": repeated(text),
    }


# --- correlations -----------------------------------------------------------------------------------------------------


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
    """Whether larger margins are surer ones; all but the bins None without pairs."""

    bins: tuple[MarginBin, ...]
    error: float | None
    """The expected calibration error: the mean of |accuracy - predicted|, weighed by the pairs."""
    brier: float | None = None
    """Mean of (1 - p)^2, where p is what the margin's sigmoid gives the chosen one: 0.25 is a coin's."""
    temperature: float | None = None
    """By which margins are divided to be likeliest; None also where none is: all are right, or no better than chance.
    Fit on the same pairs, so that on others the two below are a little worse."""
    error_at_temperature: float | None = None
    brier_at_temperature: float | None = None


def calibration(margins: Sequence[float], *, num_bins: int = 5) -> Calibration:
    """Accuracy by the distance between the scores, in bins of about equally many pairs.

    Source of the temperature: Guo et al. 2017, arXiv:1706.04599, for Bradley and Terry's model of pairs.

    Args:
        margins: of each pair, the chosen one's score less the rejected one's.
        num_bins: at most as many.
    """
    count = min(whole_number("calibration.num_bins", num_bins, low=1), len(margins))
    ordered = sorted(margins, key=abs)
    bins = _margin_bins(ordered, count)
    found = Calibration(bins, _error(bins), _brier(ordered), _temperature(ordered))
    if found.temperature is None:
        return found
    cooled = [margin / found.temperature for margin in ordered]
    return replace(found, error_at_temperature=_error(_margin_bins(cooled, count)), brier_at_temperature=_brier(cooled))


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
    """Where the likelihood's slope is 0: it falls all the way, so halving finds the place."""
    largest = max(map(abs, margins), default=0.0)
    if not largest or min(margins) >= 0.0:
        return None
    units = [margin / largest for margin in margins]

    def slope(sharpness: float) -> float:
        """Of the log-likelihood of the margins times `sharpness`."""
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
