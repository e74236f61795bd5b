"""Let a judge grade one response on its own: right or wrong, a score on a scale, or the weighted share of criteria."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from typing import Any

from agentenv.core.arguments import construct, number, shown, whole_number
from agentenv.errors import ConfigError
from agentenv.rewards.judges.asking import JudgeRetry, Voting, VotingBase
from agentenv.rewards.judges.protocol import Judge
from agentenv.rewards.judges.templates import (
    CHECKLIST,
    GRADE,
    QUALITY,
    SAMENESS,
    VERIFY,
    JudgeTemplate,
    answer_text,
    prompt_text,
    read_list,
    read_score,
    read_yes_or_no,
    reference_text,
)
from agentenv.rewards.types import Response, RewardResult, Status


class _SingleResponse(VotingBase):
    """One question about one response, answered with a number from `low` to `high`, which become 0 and 1."""

    bounds = (0.0, 1.0)
    component_names: tuple[str, ...] = ("judge", "num_votes", "agreement")
    low, high = 0.0, 1.0
    needs_label = False
    _template: JudgeTemplate
    _read: Callable[[str], Any]

    async def grade(self, response: Response) -> RewardResult:
        """Return the result; NO_ANSWER, without asking, for an empty response or one whose thinking has no end.

        Raises:
            DataError: a required reference is missing, it is not JSON, or the prompt is invalid.
            InfraError: too few votes had a verdict on all that was asked, or a majority is required and there is none.
        """
        reference = reference_text(response.label, required=self.needs_label)
        answer = answer_text(response.text, response.prompt)
        if not answer:
            nothing = {name: float(name == "agreement") for name in self.component_names}
            return RewardResult(0.0, 0.0, Status.NO_ANSWER, nothing)
        texts = {"question": prompt_text(response.prompt), "reference": reference, "response": answer}
        reward, components = self._combined(await self._votes(self._template, texts, self._read))
        return RewardResult(reward, reward, components=components, extracted=shown(answer))

    def _combined(self, found: list[Any]) -> tuple[float, Mapping[str, float]]:
        """Return the reward of what `_read` found in each vote, and its components."""
        votes = [(each - self.low) / (self.high - self.low) for each in found]
        reward = self.voting.merge(votes, "the response")
        agreement = sum(vote == reward for vote in votes) / len(votes)
        return reward, {"judge": sum(votes) / len(votes), "num_votes": float(len(votes)), "agreement": agreement}


class JudgeReward(_SingleResponse):
    """1.0 if a judge says that a response is right, else 0.0, by majority of the votes.

    Args:
        judge: the judge, or settings for `asking.judge_from`.
        criteria: when it should say yes, as text for the judge; default: if the answer equals the reference.
        needs_label: True if a row without a reference cannot be graded; else the judge has the question alone.
        voting: how often it is asked; a tie is not a verdict, and `combine` is ignored.
        retry: attempts and time limit of each vote.

    Components: `judge`, the mean of the votes; `num_votes`, those with a verdict; `agreement`, the share of them that
    equal the result.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        criteria: str | None = None,
        needs_label: bool = True,
        voting: Voting | Mapping[str, Any] | None = None,
        retry: JudgeRetry | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, retry)
        self.voting, self.needs_label = replace(self.voting, combine="majority"), needs_label
        self._template, self._read = VERIFY.fill(criteria or SAMENESS), read_yes_or_no


class PointwiseReward(_SingleResponse):
    """A judge's score of a response on a scale, mapped onto 0..1.

    Args:
        judge: the judge, or settings for `asking.judge_from`.
        scale: the lowest and highest score.
        criteria: what makes an answer good, as text for the judge; default: that of `templates`.
        needs_label: True if a row without a reference cannot be graded; else the judge has the question alone.
        voting: how often it is asked.
        retry: attempts and time limit of each vote.

    Components: those of `JudgeReward`.

    Raises:
        ConfigError: the scale, or another argument, is invalid.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        scale: tuple[float, float] = (1.0, 10.0),
        criteria: str | None = None,
        needs_label: bool = False,
        voting: Voting | Mapping[str, Any] | None = None,
        retry: JudgeRetry | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, retry)
        ends = [number("PointwiseReward.scale", end) for end in scale] if isinstance(scale, tuple | list) else []
        if len(ends) != 2 or ends[0] >= ends[1]:
            raise ConfigError(f"PointwiseReward.scale: expected (low, high), got {scale!r:.200}.")
        self.low, self.high = ends
        self.needs_label = needs_label
        self._template = GRADE.fill(criteria or QUALITY, low=self.low, high=self.high)
        self._read = partial(read_score, low=self.low, high=self.high)


MAX_CRITERIA = 100


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion of a rubric."""

    text: str
    """A statement that is true of a response or not, or to the degree of `points`."""
    weight: float = 1.0
    """Its part of the reward; negative for an undesired property."""
    points: int | None = None
    """Maximum number of points; None for yes or no."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a field is invalid."""
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConfigError(f"Criterion.text: expected a sentence, got {self.text!r:.200}. Write one.")
        number("Criterion.weight", self.weight)
        if self.points is not None:
            whole_number("Criterion.points", self.points, low=1, high=1000)

    @property
    def reply_form(self) -> str:
        """Required form of the judge's verdict on it."""
        return "YES or NO" if self.points is None else f"N/{self.points}, with N from 0 to {self.points}"


class RubricReward(_SingleResponse):
    """The weighted share of criteria that a response meets: sum(weight * met) / sum(positive weights), within 0..1.

    Args:
        judge: the judge, asked about all criteria together; or settings for `asking.judge_from`.
        criteria: the criteria; a text is one of weight 1.0, answered with yes or no, and a mapping has the fields of
            one.
        voting: how often it is asked; votes on one criterion are combined, then the criteria. If a majority is
            required and one criterion has none, the reward is missing.
        retry: attempts and time limit of each vote.

    The judge sees a row's label, if any, as the reference. A reply that leaves a criterion out is not a verdict.

    Components: `criterion_1` and so on, how far each is met, from 0 to 1; `num_votes`, those with a verdict.

    Raises:
        ConfigError: `criteria` is empty, has too many, or has none with a positive weight.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        criteria: Sequence[Criterion | str | Mapping[str, Any]],
        voting: Voting | Mapping[str, Any] | None = None,
        retry: JudgeRetry | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, retry)
        if not isinstance(criteria, list | tuple) or not 0 < len(criteria) <= MAX_CRITERIA:
            raise ConfigError(f"RubricReward.criteria: expected a list of 1..{MAX_CRITERIA}, got {criteria!r:.200}.")
        given: list[Any] = [each if isinstance(each, Criterion | Mapping) else {"text": each} for each in criteria]
        self.criteria: tuple[Criterion, ...] = tuple(
            each if isinstance(each, Criterion) else construct("RubricReward.criteria", Criterion, each)
            for each in given
        )
        self._most = fsum(max(each.weight, 0.0) for each in self.criteria)
        if not self._most:
            raise ConfigError("RubricReward.criteria: expected a positive weight, got none. Raise one.")
        self.component_names = (*(f"criterion_{place}" for place, _ in enumerate(self.criteria, 1)), "num_votes")
        self._template = CHECKLIST.fill(
            "\n".join(f"{place}. {each.text}" for place, each in enumerate(self.criteria, 1)),
            number=len(self.criteria),
            example="\n".join(f"{place}: {each.reply_form}" for place, each in enumerate(self.criteria, 1)),
        )
        self._read = partial(read_shares, criteria=self.criteria)

    def _combined(self, found: list[Any]) -> tuple[float, Mapping[str, float]]:
        columns = enumerate(zip(*found, strict=True), 1)
        shares = [self.voting.merge(each, f"criterion {place}") for place, each in columns]
        total = fsum(each.weight * share for each, share in zip(self.criteria, shares, strict=True))
        reward = min(max(total / self._most, 0.0), 1.0)
        return reward, dict(zip(self.component_names, [*shares, float(len(found))], strict=True))


def read_shares(reply: str, criteria: Sequence[Criterion]) -> list[float] | None:
    """Return how far each criterion is met, from 0 to 1; None unless the reply has a verdict on all of them.

    The verdicts are its last lines, one per criterion ("2: YES", "3. 4/5"), or one JSON object ({"1": "yes", "2": 4}).
    """
    verdicts = read_list(reply, len(criteria))
    if verdicts is None:
        return None
    shares: list[float] = []
    for place, criterion in enumerate(criteria, 1):
        verdict = verdicts[place].strip(" *_`")
        if criterion.points is None:
            value: float | None = read_yes_or_no(verdict) if "\n" not in verdict else None
        else:
            value = read_score(verdict, 0.0, criterion.points)
        if value is None:
            return None
        shares.append(value / (criterion.points or 1))
    return shares
