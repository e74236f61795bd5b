"""Biases of rewards: correlations with length, format and repetition, and how often the longer answer wins.

Lists hold one value per response, in order; None is a response without a reward. `agentenv.rewards.hygiene` has the
figures of a run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentenv.errors import ConfigError
from agentenv.rewards.hygiene import num_marks, pearson, repeated, spearman


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
