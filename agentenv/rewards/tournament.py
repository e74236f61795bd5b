"""Rewards of a group from comparisons of its responses, two at a time.

`comparison_score` is r_i = (2 * points_i - n_i) / n_i, from -1 for one that lost every comparison to 1; a tie is half a
point, and a comparison that failed is none: n_i does not count it. Where all of a response's failed it has no reward.
Source: OpenJudge, GRPOTournamentEvaluationStrategy, where ties are losses and a group whose judge failed is all ties.

Neither places in the group nor in the judge's prompt matter: each pair is shown in both orders, or in one that is drawn
from the texts.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, Protocol

from agentenv.deadlines import StepTimeout, bounded
from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.rewards._arguments import number, one_of, shown, whole_number
from agentenv.rewards.groups import against_reference
from agentenv.rewards.ratings import ELO_PER_NAT, bradley_terry
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.types import Message

Measure = Literal["comparison_score", "win_rate", "copeland", "bradley_terry"]
_MEASURES = ("comparison_score", "win_rate", "copeland", "bradley_terry")


class Comparer(Protocol):
    """Compares two answers, as `judges.pairwise.PairwiseJudge` does."""

    async def compare(self, prompt: str | Sequence[Message], a: str, b: str) -> float | None:
        """1.0 where `a` is better, 0.5 for a tie, 0.0 where `b` is; None where nobody knows, or InfraError."""


class Tournament:
    """Compares the responses of a group with each other; a GroupReward.

    Args:
        comparer: what compares two answers; it is shown no thinking.
        measure: which component is the reward.
        both_orders: each pair is compared twice, once in each order; else once, in an order drawn from the texts.
        opponents: about how many others each is compared with, drawn from the texts; None for all.
        max_concurrent: most comparisons of a group at a time.
        limit_s: longest that one comparison may take; beyond it has failed.
        seed: of what is drawn.

    Equal texts tie without being compared, and a response without an answer (thinking that has no end, or nothing else)
    loses against one with; one whose comparisons all failed has no reward for that. A group of one response, without a
    reference, is compared with nothing: 0.0, `n_valid` 0.

    Components: `comparison_score`; `win_rate`, points per comparison; `copeland`, the pairs won less those lost, per
    pair; `n_valid`, the comparisons that did not fail; `win` and `win_and`, whether it scored more than the reference,
    and as much, None without one; where that is the measure `bradley_terry`, 2 p - 1 of the probability p to beat an
    average one, and `elo`, the rating that says the same. `score` is the win rate.

    Raises:
        ConfigError: an argument is out of range.
    """

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
                f"Tournament.comparer: expected an object with compare(prompt, a, b), got {comparer!r:.200} ({error}). "
                "Pass one."
            ) from error
        self.comparer, self.both_orders, self.seed = comparer, both_orders, seed
        self.measure = one_of("Tournament.measure", measure, _MEASURES)
        self.opponents = None if opponents is None else whole_number("Tournament.opponents", opponents, low=1)
        self.max_concurrent = whole_number("Tournament.max_concurrent", max_concurrent, low=1)
        self.limit_s = number("Tournament.limit_s", limit_s, low=0.001)

    @property
    def component_names(self) -> tuple[str, ...]:
        """The components of every result."""
        rated = ("bradley_terry", "elo") if self.measure == "bradley_terry" else ()
        return (*_MEASURES[:3], "n_valid", *rated, "win", "win_and")

    @property
    def bounds(self) -> tuple[float, float]:
        """0..1 for the win rate, else -1..1."""
        return (0.0, 1.0) if self.measure == "win_rate" else (-1.0, 1.0)

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """One result per response, in order; INFRA for one whose comparisons all failed.

        Raises:
            DataError: the comparer cannot use the rows.
        """
        texts = [final_text(response.text) or "" for response in responses]
        judged = final_text(reference) if reference else None
        competitors = [*texts, judged] if judged else texts
        table = await self._played(responses[0].prompt if responses else "", competitors)
        # Strengths take a group of 64 half a second.
        rated = self.measure == "bradley_terry"
        standings = await asyncio.to_thread(table.standings, competitors, rated=rated)
        against = standings[-1]["comparison_score"] if judged else None
        return [
            self._result(text, standing | against_reference(standing["comparison_score"], against), table)
            for text, standing in zip(texts, standings, strict=False)
        ]

    def _result(self, text: str, components: dict[str, float | None], table: _Table) -> RewardResult:
        reward, detail = components[self.measure], table.detail()
        if reward is None:
            return RewardResult(None, status=Status.INFRA, components=components, detail=detail)
        status = Status.OK if text else Status.NO_ANSWER
        return RewardResult(
            reward, components["win_rate"], status, components, extracted=shown(text) or None, detail=detail
        )

    async def _played(self, prompt: str | Sequence[Message], texts: Sequence[str]) -> _Table:
        """The table of all comparisons between the texts that differ."""
        free, table = asyncio.Semaphore(self.max_concurrent), _Table(2 if self.both_orders else 1)

        async def one(a: str, b: str) -> float | None:
            """What a comparison gives; its time starts when its turn has come."""
            async with free:
                return await self._compare(prompt, a, b)

        marks = {text: self._drawn(text) for text in set(texts) if text}
        pairs = list(self._games(sorted(marks, key=marks.__getitem__), marks))
        found = await asyncio.gather(*(one(a, b) for a, b in pairs), return_exceptions=True)
        for (a, b), points in zip(pairs, found, strict=True):
            if isinstance(points, DataError):
                raise points
            table.enter(a, b, points)
        if "" in texts:
            for text in {text for text in texts if text}:
                table.award(text, "", 1.0)
        for text in set(texts):
            table.award(text, text, 0.5)
        return table

    async def _compare(self, prompt: str | Sequence[Message], a: str, b: str) -> float | None:
        points = await bounded(self.comparer.compare, prompt, a, b, limit_s=self.limit_s, flag="limit_s")
        if points is None or points in (0.0, 0.5, 1.0):
            return None if points is None else float(points)
        raise ContractError(f"compare: expected 0.0, 0.5, 1.0 or None, got {points!r:.200}. Mend the comparer.")

    def _games(self, texts: Sequence[str], marks: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
        """Who is compared with whom, first shown first."""
        for i, j in self._pairs(len(texts)):
            a, b = texts[i], texts[j]  # in the order of what was drawn for each
            straight = hashlib.sha256(marks[a] + marks[b]).digest()[0] & 1
            if self.both_orders or straight:
                yield a, b
            if self.both_orders or not straight:
                yield b, a

    def _pairs(self, count: int) -> list[tuple[int, int]]:
        """All pairs, or those of neighbours on a ring: equally many for each, and at most one more than asked for."""
        if self.opponents is None or self.opponents >= count - 1:
            return list(combinations(range(count), 2))
        steps = [*range(1, self.opponents // 2 + 1), *([count // 2] if self.opponents % 2 else [])]
        ends = [(i, (i + step) % count) for step in steps for i in range(count)]
        return sorted({(min(pair), max(pair)) for pair in ends})

    def _drawn(self, text: str) -> bytes:
        """What is drawn for a text: the same wherever it stands."""
        return hashlib.sha256(f"{self.seed} ".encode() + text.encode(errors="surrogatepass")).digest()


@dataclass(slots=True)
class _Table:
    """Who was compared with whom, and the points that came of it."""

    per_pair: int
    """Comparisons of a pair."""
    games: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Of the first against the second, in both orders of showing."""
    failures: list[str] = field(default_factory=list)
    num_games: int = 0
    asked: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    """Texts that were in a comparison, and in one that did not fail."""

    def enter(self, a: str, b: str, points: Any) -> None:
        """Note a comparison; one that gave no number failed."""
        self.num_games += 1
        self.asked |= {a, b}
        if isinstance(points, float):
            self.answered |= {a, b}
            self.games.setdefault((a, b), []).append(points)
            self.games.setdefault((b, a), []).append(1.0 - points)
        else:
            plain = points is None or isinstance(points, StepTimeout)
            self.failures.append(f"{points}" if plain else f"{type(points).__name__}: {points}")

    def award(self, a: str, b: str, points: float) -> None:
        """Give points for all comparisons of a pair that need none."""
        self.games[a, b] = [points] * self.per_pair
        self.games[b, a] = [1.0 - points] * self.per_pair

    def detail(self) -> str:
        """What went wrong, for people."""
        if not self.failures:
            return ""
        return f"{len(self.failures)} of {self.num_games} comparisons failed; the first: {self.failures[0]}"[:500]

    def standings(self, texts: Sequence[str], *, rated: bool) -> list[dict[str, float | None]]:
        """The measures of each competitor; a text that occurs twice counts as two, who tie with each other."""
        met = [[self.games.get((a, b), []) if i != j else [] for j, b in enumerate(texts)] for i, a in enumerate(texts)]
        unknown = self.asked - self.answered  # what needs no comparison says too little of these
        rows = [[] if text in unknown else row for text, row in zip(texts, met, strict=True)]
        standings = [_measured(row, alone=len(texts) == 1) for row in rows]
        if rated:
            ratings = bradley_terry([[math.fsum(pair) for pair in row] for row in met])
            for standing, rating in zip(standings, ratings, strict=True):
                known = standing["comparison_score"] is not None
                standing["bradley_terry"] = math.tanh(rating / 2) if known else None
                standing["elo"] = 1500.0 + ELO_PER_NAT * rating if known else None
        return standings


def _measured(met: Sequence[Sequence[float]], *, alone: bool) -> dict[str, float | None]:
    """The measures of a competitor, of the points that it took from each other one."""
    points = [point for pair in met for point in pair]
    pairs = [2 * math.fsum(pair) - len(pair) for pair in met if pair]
    if not points:
        even, half = (0.0, 0.5) if alone else (None, None)
        return {"comparison_score": even, "win_rate": half, "copeland": even, "n_valid": 0.0}
    count, total = float(len(points)), math.fsum(points)
    copeland = sum((pair > 0) - (pair < 0) for pair in pairs) / len(pairs)
    score = (2 * total - count) / count
    return {"comparison_score": score, "win_rate": total / count, "copeland": copeland, "n_valid": count}
