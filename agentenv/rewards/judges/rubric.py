"""A response judged by a list of criteria, each on its own; the reward is their weighted share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import Any

from agentenv.errors import ConfigError
from agentenv.rewards._arguments import number, shown, whole_number
from agentenv.rewards.judges.asking import Asker, Asking, Voting
from agentenv.rewards.judges.draws import Judge
from agentenv.rewards.judges.templates import CHECKLIST, prompt_text, reference_text
from agentenv.rewards.judges.verdicts import listed, scored, yes_or_no
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

MAX_CRITERIA = 100


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that a response is judged by."""

    text: str
    """Something that is true of a response or not, or to the degree of `points`."""
    weight: float = 1.0
    """Its part of the reward; negative for what should not be."""
    points: int | None = None
    """The most points that it gives; None for yes or no."""

    def __post_init__(self) -> None:
        """Refuse what cannot be asked."""
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConfigError(f"Criterion.text: expected a sentence, got {self.text!r:.200}. Write one.")
        number("Criterion.weight", self.weight)
        if self.points is not None:
            whole_number("Criterion.points", self.points, low=1, high=1000)


class RubricReward(Asker):
    """The weighted share of criteria that a response meets: sum(weight * met) / sum(positive weights), within 0..1.

    Args:
        judge: who is asked, about all criteria at once.
        criteria: of the reward; a plain text is a criterion of weight 1.0, answered with yes or no, and a mapping one
            of these fields.
        voting: how often it is asked; votes on one criterion are combined, then the criteria. Without a majority on
            one of them, where that is asked for, nobody knows.
        asking: how often and how long each vote is.

    A row's label, if any, is shown as the reference. A reply that leaves a criterion out is no verdict.

    Components: `criterion_1` and so on, how far each is met, from 0 to 1; `num_votes`, those that gave a verdict.

    Raises:
        ConfigError: there are no criteria, too many, or none has a positive weight.
    """

    bounds = (0.0, 1.0)

    def __init__(
        self,
        judge: Judge,
        *,
        criteria: Sequence[Criterion | str | Mapping[str, Any]],
        voting: Voting | Mapping[str, Any] | None = None,
        asking: Asking | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, asking)
        if not isinstance(criteria, list | tuple) or not 0 < len(criteria) <= MAX_CRITERIA:
            raise ConfigError(
                f"RubricReward.criteria: expected a list of 1..{MAX_CRITERIA}, got {criteria!r:.200}. Write some."
            )
        self.criteria = tuple(map(_criterion, criteria))
        self._most = fsum(max(each.weight, 0.0) for each in self.criteria)
        if not self._most:
            raise ConfigError("RubricReward.criteria: expected a positive weight, got none. Raise one.")
        self.component_names = (*(f"criterion_{place}" for place, _ in enumerate(self.criteria, 1)), "num_votes")
        self._template = CHECKLIST.filled(
            "\n".join(f"{place}. {each.text}" for place, each in enumerate(self.criteria, 1)),
            number=len(self.criteria),
            example="\n".join(f"{place}: {_form(each)}" for place, each in enumerate(self.criteria, 1)),
        )

    async def grade(self, response: Response) -> RewardResult:
        """The share; NO_ANSWER, without asking, for a response that is empty or whose thinking has no end.

        Raises:
            DataError: the label is no JSON.
            InfraError: too few votes gave a verdict on every criterion.
        """
        reference, answer = reference_text(response.label, needed=False), final_text(response.text)
        if not answer:
            return RewardResult(0.0, 0.0, Status.NO_ANSWER, dict.fromkeys(self.component_names, 0.0))
        texts = {"question": prompt_text(response.prompt), "reference": reference, "response": answer}
        return self._result(await self._votes(self._template, texts, partial(met, criteria=self.criteria)), answer)

    def _result(self, votes: Sequence[Sequence[float]], answer: str) -> RewardResult:
        columns = enumerate(zip(*votes, strict=True), 1)
        shares = [self.voting.combined(each, f"criterion {place}") for place, each in columns]
        total = fsum(each.weight * share for each, share in zip(self.criteria, shares, strict=True))
        reward = min(max(total / self._most, 0.0), 1.0)
        components = dict(zip(self.component_names, [*shares, float(len(votes))], strict=True))
        return RewardResult(reward, reward, components=components, extracted=shown(answer))


def met(reply: str, criteria: Sequence[Criterion]) -> list[float] | None:
    """How far each criterion is met, from 0 to 1, by a reply that says so of all of them; else None.

    Its last lines do, one for each criterion ("2: YES", "3. 4/5"), or it is one JSON object ({"1": "yes", "2": 4}).
    """
    said = listed(reply, len(criteria))
    if said is None:
        return None
    found = [_value(said[place], each) for place, each in enumerate(criteria, 1)]
    values = [each for each in found if each is not None]
    return values if len(values) == len(criteria) else None


def _criterion(given: Any) -> Criterion:
    """A criterion, made of its text or of its fields.

    Raises:
        ConfigError: it cannot be.
    """
    if isinstance(given, Criterion):
        return given
    if not isinstance(given, Mapping):
        return Criterion(given)
    if "text" not in given or not given.keys() <= {"text", "weight", "points"}:
        raise ConfigError(f"RubricReward.criteria: expected text, weight and points, got {given!r:.200}. Correct it.")
    return Criterion(**given)


def _value(said: str, criterion: Criterion) -> float | None:
    said = said.strip(" *_`")
    if criterion.points is None:
        verdict = yes_or_no(said) if "\n" not in said else None
        return None if verdict is None else float(verdict)
    points = scored(said, 0.0, criterion.points)
    return None if points is None else points / criterion.points


def _form(criterion: Criterion) -> str:
    return "YES or NO" if criterion.points is None else f"N/{criterion.points}, with N from 0 to {criterion.points}"
