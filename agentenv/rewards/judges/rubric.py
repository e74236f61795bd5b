"""A response judged by a list of criteria, each on its own; the reward is their weighted share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards._arguments import number, shown, whole_number
from agentenv.rewards._judge_text import prompt_text, scored, yes_or_no
from agentenv.rewards.judge import Asking, Judge
from agentenv.rewards.judges import templates
from agentenv.rewards.judges.pointwise import reference_text
from agentenv.rewards.judges.voting import PATIENT, Voting, poll
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

MAX_CRITERIA = 100
_MAX_JSON = 20_000
_LINE = re.compile(r"(?:[-*•] )?\**(?:criterion )?\(?([0-9]{1,3})\**[.):]{1,2}\**\s{1,4}(\S.{0,100})", re.IGNORECASE)


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


class RubricReward:
    """The weighted share of criteria that a response meets: sum(weight * met) / sum(positive weights), within 0..1.

    Args:
        judge: who is asked, about all criteria at once.
        criteria: of the reward; a plain text is a criterion of weight 1.0, answered with yes or no.
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
        criteria: Sequence[Criterion | str],
        voting: Voting | None = None,
        asking: Asking = PATIENT,
    ) -> None:
        if isinstance(criteria, str) or not 0 < len(criteria) <= MAX_CRITERIA:
            raise ConfigError(
                f"RubricReward.criteria: expected a list of 1..{MAX_CRITERIA}, got {criteria!r:.200}. Write some."
            )
        self.criteria = tuple(each if isinstance(each, Criterion) else Criterion(each) for each in criteria)
        self._most = fsum(max(each.weight, 0.0) for each in self.criteria)
        if not self._most:
            raise ConfigError("RubricReward.criteria: expected a positive weight, got none. Raise one.")
        self.judge, self.voting, self.asking = judge, voting or Voting(), asking
        self.component_names = (*(f"criterion_{place}" for place, _ in enumerate(self.criteria, 1)), "num_votes")
        self._instructions = templates.filled(
            templates.CHECKLIST,
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
            none = dict.fromkeys(self.component_names, 0.0)
            return RewardResult(0.0, 0.0, Status.NO_ANSWER, none)
        texts = templates.texts_of(prompt_text(response.prompt), reference=reference, response=answer)
        number_of = len(self.criteria)
        ending = f"End with {number_of} lines, one for each criterion."
        votes = await poll(
            self.judge,
            templates.asking_about(self._instructions, texts, ending=ending, max_chars=self.asking.max_chars),
            partial(met, criteria=self.criteria),
            asking=self.asking,
            voting=self.voting,
            expected=f"a verdict on each of {number_of} criteria",
        )
        return self._result(votes, answer)

    def _result(self, votes: Sequence[Sequence[float]], answer: str) -> RewardResult:
        combined = [self.voting.combined(each) for each in zip(*votes, strict=True)]
        shares = [each for each in combined if each is not None]
        if len(shares) < len(combined):
            place = combined.index(None) + 1
            raise InfraError(f"RubricReward: expected a majority on criterion {place}, got even votes. Ask more.")
        total = fsum(each.weight * share for each, share in zip(self.criteria, shares, strict=True))
        reward = min(max(total / self._most, 0.0), 1.0)
        components = dict(zip(self.component_names, [*shares, float(len(votes))], strict=True))
        return RewardResult(reward, reward, components=components, extracted=shown(answer))


def met(reply: str, criteria: Sequence[Criterion]) -> list[float] | None:
    """How far each criterion is met, from 0 to 1, by a reply that says so of all of them; else None.

    Its last lines do, one for each criterion ("2: YES", "3. 4/5"), or it is one JSON object ({"1": "yes", "2": 4}).
    """
    said = _said(final_text(reply) or "", len(criteria))
    if said is None:
        return None
    found = [_value(said[place], each) for place, each in enumerate(criteria, 1)]
    values = [each for each in found if each is not None]
    return values if len(values) == len(criteria) else None


def _said(text: str, number: int) -> dict[int, str] | None:
    """What is said of each criterion, where each is named once and nothing else follows."""
    unfenced = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    pairs = _json_pairs(unfenced) if unfenced.startswith("{") else _line_pairs(text, number)
    said = dict(pairs)
    return said if len(pairs) == number and said.keys() == set(range(1, number + 1)) else None


def _line_pairs(text: str, number: int) -> list[tuple[int, str]]:
    text = text.strip().removesuffix("```")
    lines = [line.strip() for line in text.split("\n") if line.strip()][-number:]
    found = [_LINE.fullmatch(line) for line in lines]
    return [(int(match[1]), match[2]) for match in found if match]


def _json_pairs(text: str) -> list[tuple[int, str]]:
    try:
        pairs = json.loads(text, object_pairs_hook=list) if len(text) <= _MAX_JSON else []
    except (ValueError, RecursionError):
        return []
    plain = [(key, value) for key, value in pairs if isinstance(value, str | int | float) and key.isdecimal()]
    named = [(int(key), str(value)) for key, value in plain if len(key) <= 3]
    return named if len(named) == len(pairs) else []


def _value(said: str, criterion: Criterion) -> float | None:
    said = said.strip(" *_`")
    if criterion.points is None:
        verdict = yes_or_no(said) if "\n" not in said else None
        return None if verdict is None else float(verdict)
    points = scored(said, 0.0, criterion.points)
    return None if points is None else points / criterion.points


def _form(criterion: Criterion) -> str:
    return "YES or NO" if criterion.points is None else f"N/{criterion.points}, with N from 0 to {criterion.points}"
