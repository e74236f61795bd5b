"""Sums of rewards: each term has a name, a weight and bounds, and a term that failed is never made up for.

The sum is over what was declared, not a mean over what happens to be there: with a mean over the present, a judge that
is down leaves a well-formed answer the whole reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from typing import Any, Generic, TypeVar

from agentenv.errors import ConfigError
from agentenv.rewards._arguments import is_reward, number
from agentenv.rewards.grading import DEADLINE_S, graded
from agentenv.rewards.groups import GROUP_LIMIT_S, graded_group
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult, Status, is_finite

FAILED_TERMS = "failed_terms"
"""The component that counts the terms without a reward."""
TERM_LIMIT_S = 40.0
"""Longest that a term may take, unless said otherwise: less than the sum has, so that a slow one ends alone."""
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Term(Generic[_R]):
    """One reward in a sum."""

    reward: _R
    weight: float = 1.0
    """May be negative."""
    required: bool = True
    """Where a required term fails, the whole has no reward; where another one fails, it adds nothing."""


class _Sum(Generic[_R]):
    """What sums over responses and over groups have in common."""

    _method: str
    """What a term's reward is asked by."""

    def __init__(self, terms: Mapping[str, Term[_R]], *, score_from: str | None, limit_s: float) -> None:
        where = type(self).__name__
        if not terms or not all(isinstance(term, Term) for term in terms.values()):
            raise ConfigError(f"{where}: expected terms by name, got {terms!r:.200}. Pass {{'name': Term(reward)}}.")
        wrong = [name for name in terms if not isinstance(name, str) or not name or "/" in name or name == FAILED_TERMS]
        if wrong:
            raise ConfigError(f"{where}: expected names without '/', got {wrong[0]!r}. Choose another name.")
        if not any(term.required for term in terms.values()):
            raise ConfigError(f"{where}: expected a required term, got none of {list(terms)}. Require one.")
        if score_from is not None and score_from not in terms:
            raise ConfigError(f"{where}.score_from: expected one of {list(terms)}, got {score_from!r}. Name a term.")
        for name, term in terms.items():
            number(f"{where}.{name}.weight", term.weight)
            is_reward(f"{where}.{name}.reward", term.reward, self._method)
            if not isinstance(term.required, bool):
                raise ConfigError(
                    f"{where}.{name}.required: expected True or False, got {term.required!r:.200}. Change the value."
                )
        self.terms, self.score_from = dict(terms), score_from
        self.limit_s = number(f"{where}.limit_s", limit_s, low=0.001)

    @property
    def bounds(self) -> tuple[float, float]:
        """The weighted sums of the terms' bounds; 0 is among those of a term that may fail."""
        ends = [_ends(term, term.reward.bounds) for term in self.terms.values()]  # type: ignore[attr-defined]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    @property
    def component_names(self) -> tuple[str, ...]:
        """The components of every result: each term's reward, what it declares as its own (`term/part`), a count."""
        parts = [
            (name, *(f"{name}/{part}" for part in getattr(term.reward, "component_names", ())))
            for name, term in self.terms.items()
        ]
        return (*chain.from_iterable(parts), FAILED_TERMS)

    def _summed(self, results: Mapping[str, RewardResult]) -> RewardResult:
        """The result of one response, of those of its terms."""
        components = self._components(results)
        failed = {name: each for name, each in results.items() if each.reward is None}
        missing = [each for name, each in failed.items() if self.terms[name].required]
        detail = "; ".join(f"{name}: {each.detail}" for name, each in failed.items())[:500]
        if missing:
            status = Status.LABEL if any(each.status is Status.LABEL for each in missing) else Status.INFRA
            return RewardResult(None, status=status, components=components, detail=detail)
        total = fsum(self.terms[name].weight * each.reward for name, each in results.items() if each.reward is not None)
        if not is_finite(total):
            return RewardResult(None, status=Status.INFRA, components=components, detail=f"the sum is {total!r}")
        first = next(name for name, term in self.terms.items() if term.required)
        named = self.score_from or max(self.terms, key=lambda name: self.terms[name].weight)
        main = results[first if named in failed else named]
        feedback = "\n".join(dict.fromkeys(result.feedback for result in results.values() if result.feedback))
        return RewardResult(total, results[named].score, main.status, components, main.extracted, feedback, detail)

    def _components(self, results: Mapping[str, RewardResult]) -> dict[str, float | None]:
        components: dict[str, float | None] = {}
        for name, result in results.items():
            components[name] = result.reward
            for part in getattr(self.terms[name].reward, "component_names", ()):
                components[f"{name}/{part}"] = result.components.get(part)
        return components | {FAILED_TERMS: float(sum(result.reward is None for result in results.values()))}


class WeightedSum(_Sum[Reward]):
    """The weighted sum of rewards of one response; terms run side by side.

    Components are the terms' own rewards under their names, before weights, None for one that failed, and
    `failed_terms` counts those; what a term declares in `component_names`, as a sum does, is there as `term/part`.
    Score, status and extracted answer are those of the term that `score_from` names, else of the one with the greatest
    weight; where that one failed there is no score, and the rest is the first required term's.

    Example: `WeightedSum({"answer": Term(MathReward(), 0.9), "format": Term(ThinkFormatReward(), 0.1)})`
    """

    _method = "grade"

    def __init__(
        self, terms: Mapping[str, Term[Reward]], *, score_from: str | None = None, limit_s: float = TERM_LIMIT_S
    ) -> None:
        """Raises ConfigError for terms that cannot be summed; `limit_s` is each term's deadline."""
        super().__init__(terms, score_from=score_from, limit_s=limit_s)

    @property
    def patience_s(self) -> float:
        """Longest that grading may take, which `graded` keeps to where it is told nothing else: more than a term."""
        return self.limit_s + DEADLINE_S - TERM_LIMIT_S

    async def grade(self, response: Response) -> RewardResult:
        """The sum; LABEL or INFRA, with every component that is known, where a required term failed."""
        work = (graded(term.reward, response, limit_s=self.limit_s) for term in self.terms.values())
        return self._summed(dict(zip(self.terms, await asyncio.gather(*work), strict=True)))


class GroupSum(_Sum[GroupReward]):
    """The weighted sum of group rewards; see `WeightedSum`. `groups.Each` makes a term of a reward of one response."""

    _method = "grade_group"

    def __init__(
        self, terms: Mapping[str, Term[GroupReward]], *, score_from: str | None = None, limit_s: float = GROUP_LIMIT_S
    ) -> None:
        """Raises ConfigError for terms that cannot be summed; `limit_s` is each term's deadline for a group."""
        super().__init__(terms, score_from=score_from, limit_s=limit_s)

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """One sum per response, in order."""
        work = (graded_group(term.reward, responses, reference, limit_s=self.limit_s) for term in self.terms.values())
        grades = await asyncio.gather(*work)
        columns = dict(zip(self.terms, (grade.results for grade in grades), strict=True))
        return [
            self._summed({name: results[index] for name, results in columns.items()}) for index in range(len(responses))
        ]


def _ends(term: Term[Any], bounds: tuple[float, float]) -> tuple[float, float]:
    if term.weight == 0:
        return 0.0, 0.0
    low, high = sorted(term.weight * bound for bound in bounds)
    return (low, high) if term.required else (min(low, 0.0), max(high, 0.0))
