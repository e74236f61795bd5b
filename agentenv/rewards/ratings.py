"""Strengths of competitors from the points they took from each other: Bradley-Terry, and the same on Elo's scale.

Elo's updates, one game after another, give ratings that depend on the order of the games. What they settle on, game by
game in small enough steps, is the Bradley-Terry estimate; this computes that, so that no order and no index matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentenv.errors import ConfigError
from agentenv.rewards._arguments import number

_MAX_ROUNDS = 1000
_MAX_SCALINGS = 50
_TOLERANCE = 1e-9
ELO_PER_NAT = 400.0 / math.log(10.0)


def bradley_terry(points: Sequence[Sequence[float]], *, prior: float = 1.0) -> list[float]:
    """Each competitor's log-strength: i beats j with probability 1 / (1 + exp(s_j - s_i)), an average one has 0.0.

    The probabilities to beat an average one have the mean 1/2.

    Args:
        points: [n][n] what i took from j, in all games between them: 1 for a win, 0.5 for a tie.
        prior: games of which each is taken to have had half the points, against an average one. Above 0, it keeps who
            won or lost every game finite, and puts one without games at the average.

    Raises:
        ConfigError: points are no square of numbers >= 0, or the prior is not above 0.

    Source: D. Hunter, MM algorithms for generalized Bradley-Terry models, Annals of Statistics 32 (2004).
    """
    count = len(points)
    number("bradley_terry.prior", prior, low=1e-6)
    if any(len(row) != count or not all(0.0 <= point < math.inf for point in row) for row in points):
        raise ConfigError(
            f"bradley_terry.points: expected {count} rows of {count} numbers >= 0, got {points!r:.200}. Correct them."
        )
    games = [[points[i][j] + points[j][i] if i != j else 0.0 for j in range(count)] for i in range(count)]
    won = [math.fsum(point for j, point in enumerate(row) if j != i) + prior / 2 for i, row in enumerate(points)]
    strengths = [1.0] * count
    for _ in range(_MAX_ROUNDS):
        rates = [_expected(games[i], strengths, i) + prior / (strengths[i] + 1.0) for i in range(count)]
        updated = _centred([won[i] / rates[i] for i in range(count)])
        moved = max((abs(math.log(new / old)) for new, old in zip(updated, strengths, strict=True)), default=0.0)
        strengths = updated
        if moved < _TOLERANCE:
            break
    return [math.log(strength) for strength in strengths]


def elo(points: Sequence[Sequence[float]], *, prior: float = 1.0, average: float = 1500.0) -> list[float]:
    """Each competitor's rating, in which 400 more are ten times the strength; see `bradley_terry`."""
    return [average + ELO_PER_NAT * strength for strength in bradley_terry(points, prior=prior)]


def _centred(strengths: Sequence[float]) -> list[float]:
    """The strengths, all scaled by what is most likely under the prior; alone, the steps would take long to find it."""
    scale = 1.0
    for _ in range(_MAX_SCALINGS):
        chances = [scale * strength / (scale * strength + 1.0) for strength in strengths]
        excess = math.fsum(chances) - len(strengths) / 2
        slope = math.fsum(chance * (1.0 - chance) for chance in chances)
        step = min(max(excess / slope, -1.0), 1.0) if slope else 0.0
        scale *= math.exp(-step)
        if abs(step) < _TOLERANCE:
            break
    return [scale * strength for strength in strengths]


def _expected(games: Sequence[float], strengths: Sequence[float], i: int) -> float:
    return math.fsum(num / (strengths[i] + other) for num, other in zip(games, strengths, strict=True) if num)
