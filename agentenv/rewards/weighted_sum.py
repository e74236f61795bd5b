"""Add up rewards: each term has a name, a weight and bounds, and nothing replaces a term that failed.

The sum is over all declared terms, not a mean over those that succeeded: with such a mean, a well-formed answer would
have the whole reward while the judge is down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import fsum

from agentenv.core.arguments import is_finite, is_reward, number
from agentenv.errors import ConfigError
from agentenv.rewards.grading import DEADLINE_S, check_row, grade
from agentenv.rewards.types import Response, Reward, RewardResult, Status
from agentenv.sandbox.types import Isolation

FAILED_TERMS = "failed_terms"
"""The component that counts the terms without a reward."""
TERM_LIMIT_S = 40.0
"""Default time limit of a term: less than that of the sum, so that a slow term fails alone."""


@dataclass(frozen=True, slots=True)
class Term:
    """One reward in a sum."""

    reward: Reward
    weight: float = 1.0
    """May be negative."""
    required: bool = True
    """If a required term fails, the sum has no reward; another one that fails adds nothing."""


class WeightedSum:
    """The weighted sum of rewards of one response; terms run concurrently.

    Components are the terms' rewards by name, before weights, None for one that failed, and `failed_terms` counts
    those; the parts that a term declares in `component_names`, as a sum does, are there as `term/part`. Score, status
    and extracted answer are those of the term that `score_from` names, else of the one with the greatest weight. If
    that one failed, the score is missing, and the rest is from the first required term.

    Example: `WeightedSum({"answer": Term(MathReward(), 0.9), "format": Term(ThinkFormatReward(), 0.1)})`
    """

    def __init__(
        self, terms: Mapping[str, Term], *, score_from: str | None = None, limit_s: float = TERM_LIMIT_S
    ) -> None:
        """Raise ConfigError if the terms cannot be added up; `limit_s` is the time limit of each term."""
        if not terms or not all(isinstance(term, Term) for term in terms.values()):
            raise ConfigError(f"WeightedSum: expected terms, got {terms!r:.200}. Pass {{'name': Term(reward)}}.")
        wrong = [name for name in terms if not isinstance(name, str) or not name or "/" in name or name == FAILED_TERMS]
        if wrong:
            raise ConfigError(f"WeightedSum: expected names without '/', got {wrong[0]!r}. Choose another name.")
        if not any(term.required for term in terms.values()):
            raise ConfigError(f"WeightedSum: expected a required term, got none of {list(terms)}. Require one.")
        if score_from is not None and score_from not in terms:
            raise ConfigError(f"WeightedSum.score_from: expected one of {list(terms)}, got {score_from!r}.")
        for name, term in terms.items():
            number(f"WeightedSum.{name}.weight", term.weight)
            is_reward(f"WeightedSum.{name}.reward", term.reward, "grade")
            if not isinstance(term.required, bool):
                raise ConfigError(f"WeightedSum.{name}.required: expected True or False, got {term.required!r:.200}.")
        self.terms = dict(terms)
        self.score_from = score_from
        self.limit_s = number("WeightedSum.limit_s", limit_s, low=0.001)

    @property
    def bounds(self) -> tuple[float, float]:
        """Weighted sums of the terms' bounds; a term that may fail can add 0."""
        lowest = highest = 0.0
        for term in self.terms.values():
            if term.weight:
                low, high = sorted(term.weight * bound for bound in term.reward.bounds)
                lowest += low if term.required else min(low, 0.0)
                highest += high if term.required else max(high, 0.0)
        return lowest, highest

    @property
    def component_names(self) -> tuple[str, ...]:
        """Names of the components of every result: each term, the parts that it declares (`term/part`), a count."""
        parts = [
            (name, *(f"{name}/{part}" for part in getattr(term.reward, "component_names", ())))
            for name, term in self.terms.items()
        ]
        return (*chain.from_iterable(parts), FAILED_TERMS)

    @property
    def patience_s(self) -> float:
        """Default time limit of `grading.grade` for this reward: longer than that of a term."""
        return self.limit_s + DEADLINE_S - TERM_LIMIT_S

    async def check_row(self, row: Response) -> None:
        """Raise DataError if a required term cannot use the row; see `grading.check_row`."""
        for term in self.terms.values():
            if term.required:
                await check_row(term.reward, row)

    async def grade(self, response: Response) -> RewardResult:
        """Return the sum; LABEL, ERROR or INFRA, with all known components, if a required term failed."""
        work = (grade(term.reward, response, limit_s=self.limit_s) for term in self.terms.values())
        results = dict(zip(self.terms, await asyncio.gather(*work), strict=True))
        components: dict[str, float | None] = {}
        for name, result in results.items():
            components[name] = result.reward
            for part in getattr(self.terms[name].reward, "component_names", ()):
                components[f"{name}/{part}"] = result.components.get(part)
        failed = {name: each for name, each in results.items() if each.reward is None}
        components[FAILED_TERMS] = float(len(failed))
        missing = [each for name, each in failed.items() if self.terms[name].required]
        detail = "; ".join(f"{name}: {each.detail}" for name, each in failed.items())[:500]
        if missing:
            kinds = {each.status for each in missing}
            status = next((kind for kind in (Status.LABEL, Status.ERROR) if kind in kinds), Status.INFRA)
            causes = sorted(missing, key=lambda each: not each.is_misconfigured)
            return RewardResult(None, status=status, components=components, detail=detail, cause=causes[0].cause)
        total = fsum(self.terms[name].weight * each.reward for name, each in results.items() if each.reward is not None)
        if not is_finite(total):
            return RewardResult(None, status=Status.INFRA, components=components, detail=f"the sum is {total!r}")
        first = next(name for name, term in self.terms.items() if term.required)
        named = self.score_from or max(self.terms, key=lambda name: self.terms[name].weight)
        main = results[first if named in failed else named]
        feedback = "\n".join(dict.fromkeys(result.feedback for result in results.values() if result.feedback))
        levels = {result.isolation for result in results.values()}
        isolation = next((level.value for level in Isolation if level in levels), "")  # the weakest
        return RewardResult(
            total, results[named].score, main.status, components, main.extracted, feedback, detail, isolation
        )
