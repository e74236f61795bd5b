"""The best actions: by value iteration over a game's transitions, and for blackjack by its odds."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

DISCOUNT = 0.99
"""Discount per step, so that the shorter of two ways to the goal is better."""
_TIE = 1e-8
_CARDS = {**dict.fromkeys(range(1, 10), 1 / 13), 10: 4 / 13}
STICK, HIT = 0, 1

Transitions = Mapping[int, Mapping[int, Any]]
"""state -> action -> [(probability, next state, reward, terminated)]: the `P` of Gymnasium's toy games."""


def action_values(transitions: Transitions) -> Any:
    """Return [num_states, num_actions] discounted sums of rewards of each action followed by the best ones."""
    num_states, num_actions = len(transitions), len(transitions[0])
    most = max(len(outcomes) for actions in transitions.values() for outcomes in actions.values())
    chance, follows, reward = np.zeros((3, num_states, num_actions, most))
    continues = np.zeros((num_states, num_actions, most))
    for state, actions in transitions.items():
        for action, outcomes in actions.items():
            for index, (probability, after, earned, ended) in enumerate(outcomes):
                at = state, action, index
                chance[at], follows[at], reward[at], continues[at] = probability, after, earned, not ended
    states, values = follows.astype(np.int64), np.zeros(num_states)
    while True:
        updated = (chance * (reward + DISCOUNT * continues * values[states])).sum(axis=2)
        best = updated.max(axis=1)
        if np.abs(best - values).max() < 1e-11:
            return updated
        values = best


def best_actions(values: Any) -> list[int]:
    """Return the actions of the highest value, several if they are equally good."""
    return [int(action) for action in np.flatnonzero(np.asarray(values) >= np.max(values) - _TIE)]


def is_certain(transitions: Transitions) -> bool:
    """Return True if every action has one outcome."""
    return all(
        len({after for probability, after, *_ in outcomes if probability > 0}) == 1
        for actions in transitions.values()
        for outcomes in actions.values()
    )


@functools.cache
def blackjack_values(total: int, dealer: int, usable_ace: bool) -> tuple[float, float]:
    """Return the average result of sticking and of hitting, with cards from an infinite deck.

    This is the best play of the game, whose average result is negative in most hands.
    """
    ends = _dealt(*_with(0, False, dealer))
    stick = sum(chance * ((end > 21 or total > end) - (total < end <= 21)) for end, chance in ends)
    hit = 0.0
    for card, chance in _CARDS.items():
        after, ace = _with(total, usable_ace, card)
        hit += chance * (-1.0 if after > 21 else max(blackjack_values(after, dealer, ace)))
    return stick, hit


def _with(total: int, usable_ace: bool, card: int) -> tuple[int, bool]:
    total += card
    if card == 1 and not usable_ace and total + 10 <= 21:
        return total + 10, True
    return (total - 10, False) if usable_ace and total > 21 else (total, usable_ace)


@functools.cache
def _dealt(total: int, usable_ace: bool) -> tuple[tuple[int, float], ...]:
    """Return the dealer's possible final totals with their probabilities."""
    if total >= 17:
        return ((total, 1.0),)
    ends: dict[int, float] = {}
    for card, probability in _CARDS.items():
        for end, share in _dealt(*_with(total, usable_ace, card)):
            ends[end] = ends.get(end, 0.0) + probability * share
    return tuple(ends.items())
