"""Reward a group by pairwise comparisons of its responses.

`comparison_score` is r_i = (2 * points_i - n_i) / n_i, from -1 for a response that lost every comparison to 1; a tie is
half a point, and n_i does not count failed comparisons. If all of a response's comparisons failed it has no reward.
Source: OpenJudge, GRPOTournamentEvaluationStrategy, where ties are losses and a group whose judge failed is all ties.

Positions in the group and in the judge's prompt do not matter: each pair is shown in both orders, or in one that is
drawn from the texts.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Literal, Protocol, get_args

import numpy as np

from agentenv._util.calls import StepTimeout, bounded
from agentenv.core.arguments import number, one_of, shown, whole_number
from agentenv.core.types import Message
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.rewards.groups.function import against_reference
from agentenv.rewards.loading import failure_of
from agentenv.rewards.rules.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

_MAX_ROUNDS = 100
_TOLERANCE = 1e-9


def bradley_terry(points: Sequence[Sequence[float]]) -> list[float]:
    """Return each competitor's log-strength s: i beats j with probability 1 / (1 + exp(s_j - s_i)).

    An average competitor has 0.0; the mean probability to beat it is 1/2. By Newton's method, to 1e-9: competitors with
    the same points have the same strength.

    Each competitor has a virtual game against an average one, with half a point: it keeps those that won or lost every
    game finite, and puts one without games at the average.

    Args:
        points: [n][n] points that i took from j, in all games between them: 1 for a win, 0.5 for a tie.

    Source: D. Hunter, MM algorithms for generalized Bradley-Terry models, Annals of Statistics 32 (2004).
    """
    count = len(points)
    won = np.array(points, dtype=float).reshape(count, count)
    np.fill_diagonal(won, 0.0)
    games, strengths = won + won.T, np.zeros(count)
    for _ in range(_MAX_ROUNDS):
        chances = 1.0 / (1.0 + np.exp(strengths - strengths[:, None]))
        even = 1.0 / (1.0 + np.exp(-strengths))
        slope = (won - games * chances).sum(axis=1) + 0.5 - even
        curve = games * chances * (1.0 - chances)
        hessian = np.diag(curve.sum(axis=1) + even * (1.0 - even)) - curve
        step = np.clip(np.linalg.solve(hessian, slope), -1.0, 1.0)
        strengths += step
        if np.abs(step).max(initial=0.0) < _TOLERANCE:
            break
    return [round(float(strength), 9) for strength in strengths]


Measure = Literal["comparison_score", "bradley_terry"]
Games = dict[tuple[str, str], list[float]]
"""Points of the first text against the second, in all comparisons of the two."""


class Comparer(Protocol):
    """A comparison of two answers, such as `judges.comparisons.PairwiseJudge`."""

    async def compare(self, prompt: str | Sequence[Message], a: str, b: str) -> float | None:
        """Return 1.0 if `a` is better, 0.5 for a tie, 0.0 if `b` is; None if unknown, or raise InfraError."""


class Tournament:
    """A GroupReward, in -1..1, that compares the responses of a group with each other.

    Args:
        comparer: compares two answers; it does not see their thinking.
        measure: the component that is the reward.
        both_orders: True to compare each pair twice, once in each order; else once, in an order drawn from the texts.
        opponents: about how many others each is compared with, drawn from the texts; None for all.
        max_concurrent: maximum number of concurrent comparisons of a group.
        limit_s: time limit of one comparison, which fails beyond it.
        seed: seed of the draws.

    Equal texts tie without a comparison, and a response without an answer (unfinished thinking, or nothing else) loses
    against one with an answer. A response whose comparisons all failed still has no reward. A group of one response,
    without a reference, has the reward 0.0 and `n_valid` 0.

    Components: `comparison_score`; `n_valid`, the comparisons that did not fail; `win` and `win_and`, 1.0 if it scored
    more than the reference, and also if as much, None without one; if it is the measure, `bradley_terry`, 2 p - 1 for
    the probability p to beat an average response. `score` is the share of the points that it took.

    Raises:
        ConfigError: an argument is out of range.
    """

    bounds = (-1.0, 1.0)

    def __init__(
        self,
        comparer: Comparer,
        *,
        measure: Measure = "comparison_score",
        both_orders: bool = True,
        opponents: int | None = None,
        max_concurrent: int = 16,
        limit_s: float = 200.0,
        seed: int = 0,
    ) -> None:
        compare = getattr(comparer, "compare", None)
        try:
            inspect.signature(compare).bind("prompt", "a", "b")  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Tournament.comparer: expected an object with compare(prompt, a, b), got {comparer!r:.200} ({error})."
            ) from error
        self.comparer = comparer
        self.both_orders = both_orders
        self.seed = seed
        self.measure = one_of("Tournament.measure", measure, get_args(Measure))
        self.opponents = None if opponents is None else whole_number("Tournament.opponents", opponents, low=1)
        self.max_concurrent = whole_number("Tournament.max_concurrent", max_concurrent, low=1)
        self.limit_s = number("Tournament.limit_s", limit_s, low=0.001)

    @property
    def component_names(self) -> tuple[str, ...]:
        """Names of the components of every result."""
        rated = ("bradley_terry",) if self.measure == "bradley_terry" else ()
        return ("comparison_score", "n_valid", *rated, "win", "win_and")

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """Return one result per response, in order; INFRA for one whose comparisons all failed.

        Raises:
            DataError: the comparer cannot use the rows.
            ContractError: the comparer raised, or returned something else.
        """
        texts = [final_text(response.text, response.prompt) or "" for response in responses]
        judged = final_text(reference) if reference else None
        competitors = [*texts, judged] if judged else texts
        games, unknown, detail = await self._play(responses[0].prompt if responses else "", competitors)
        standings = standings_of(competitors, games, unknown, rated=self.measure == "bradley_terry")
        against = standings[-1]["comparison_score"] if judged else None
        results = []
        for text, standing in zip(texts, standings, strict=False):
            components = standing | against_reference(standing["comparison_score"], against)
            reward, comparison = components[self.measure], standing["comparison_score"]
            if reward is None or comparison is None:
                results.append(RewardResult(None, status=Status.INFRA, components=components, detail=detail))
                continue
            status = Status.OK if text else Status.NO_ANSWER
            extracted = shown(text) or None
            score = (1.0 + comparison) / 2.0
            results.append(RewardResult(reward, score, status, components, extracted=extracted, detail=detail))
        return results

    async def _play(self, prompt: str | Sequence[Message], texts: Sequence[str]) -> tuple[Games, set[str], str]:
        """Return the games, the texts whose comparisons all failed, and a summary of the failures."""
        free = asyncio.Semaphore(self.max_concurrent)

        async def one(a: str, b: str) -> float | None:
            async with free:  # the time limit starts behind it
                points = await bounded(self.comparer.compare, prompt, a, b, limit_s=self.limit_s, flag="limit_s")
            if points is None or points in (0.0, 0.5, 1.0):
                return None if points is None else float(points)
            raise ContractError(f"compare: expected 0.0, 0.5, 1.0 or None, got {points!r:.200}. Fix the comparer.")

        # The draw of a text does not depend on its position.
        marks = {
            text: hashlib.sha256(f"{self.seed} ".encode() + text.encode(errors="surrogatepass")).digest()
            for text in set(texts)
            if text
        }
        pairs = list(self._games(sorted(marks, key=marks.__getitem__), marks))
        outcomes = await asyncio.gather(*(one(a, b) for a, b in pairs), return_exceptions=True)
        games: Games = {}
        failures: list[str] = []
        for (a, b), points in zip(pairs, outcomes, strict=True):
            if isinstance(points, Exception) and not isinstance(points, StepTimeout):
                failure = failure_of(points, f"{type(self.comparer).__name__}.compare")
                if not isinstance(failure, InfraError) or isinstance(failure, ConfigError):
                    raise failure from points
            if isinstance(points, float):
                games.setdefault((a, b), []).append(points)
                games.setdefault((b, a), []).append(1.0 - points)
            else:
                plain = points is None or isinstance(points, StepTimeout)
                failures.append(f"{points}" if plain else f"{type(points).__name__}: {points}")
        unknown = set(chain.from_iterable(pairs)) - set(chain.from_iterable(games))
        per_pair = 2 if self.both_orders else 1
        for text in set(texts):  # what needs no comparison
            games[text, text] = [0.5] * per_pair
            if text and "" in texts:
                games[text, ""], games["", text] = [1.0] * per_pair, [0.0] * per_pair
        detail = f"{len(failures)} of {len(pairs)} comparisons failed; the first: {failures[0]}" if failures else ""
        return games, unknown, detail[:500]

    def _games(self, texts: Sequence[str], marks: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
        """Yield the pairs to compare, with the one shown first at first place."""
        count = len(texts)
        places = list(combinations(range(count), 2))
        if self.opponents is not None and self.opponents < count - 1:
            # Those of neighbors on a ring, at most one more than `opponents` for each.
            steps = [*range(1, self.opponents // 2 + 1), *([count // 2] if self.opponents % 2 else [])]
            ends = [(i, (i + step) % count) for step in steps for i in range(count)]
            places = sorted({(min(pair), max(pair)) for pair in ends})
        for i, j in places:
            a, b = texts[i], texts[j]  # in the order of their draws
            straight = hashlib.sha256(marks[a] + marks[b]).digest()[0] & 1
            if self.both_orders or straight:
                yield a, b
            if self.both_orders or not straight:
                yield b, a


def standings_of(
    texts: Sequence[str], games: Games, unknown: set[str], *, rated: bool
) -> list[dict[str, float | None]]:
    """Return the measures of each competitor; a text that occurs twice counts as two that tie with each other.

    Those of `unknown` have no score: pairs without a comparison say too little about them.
    """
    met = [[games.get((a, b), []) if i != j else [] for j, b in enumerate(texts)] for i, a in enumerate(texts)]
    standings: list[dict[str, float | None]] = []
    for text, row in zip(texts, met, strict=True):
        points = [] if text in unknown else [point for pair in row for point in pair]
        num = float(len(points))
        score = 0.0 if len(texts) == 1 else None
        if points:
            score = (2 * math.fsum(points) - num) / num
        standings.append({"comparison_score": score, "n_valid": num})
    if rated:
        ratings = bradley_terry([[math.fsum(pair) for pair in row] for row in met])
        for standing, rating in zip(standings, ratings, strict=True):
            known = standing["comparison_score"] is not None
            standing["bradley_terry"] = math.tanh(rating / 2) if known else None
    return standings
