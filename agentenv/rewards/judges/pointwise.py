"""Let a judge grade one response on its own: right or wrong, or a score on a scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from agentenv.core.arguments import number, shown
from agentenv.errors import ConfigError
from agentenv.rewards.judges.protocol import Judge
from agentenv.rewards.judges.templates import (
    GRADE,
    QUALITY,
    SAMENESS,
    VERIFY,
    JudgeTemplate,
    answer_text,
    prompt_text,
    reference_text,
)
from agentenv.rewards.judges.verdicts import read_score, read_yes_or_no
from agentenv.rewards.judges.voting import JudgeRetry, Voting, VotingBase
from agentenv.rewards.types import Response, RewardResult, Status


class _SingleResponse(VotingBase):
    """One question about one response, answered with a number from `low` to `high`, which become 0 and 1."""

    bounds = (0.0, 1.0)
    component_names = ("judge", "num_votes", "agreement")
    low, high = 0.0, 1.0
    needs_label: bool
    _template: JudgeTemplate
    _read: Callable[[str], float | None]

    async def grade(self, response: Response) -> RewardResult:
        """Return the result; NO_ANSWER, without asking, for an empty response or one whose thinking has no end.

        Raises:
            DataError: a required reference is missing, it is not JSON, or the prompt is invalid.
            InfraError: too few votes had a verdict, or a majority is required and there is none.
        """
        reference = reference_text(response.label, required=self.needs_label)
        answer = answer_text(response.text, response.prompt)
        if not answer:
            return RewardResult(0.0, 0.0, Status.NO_ANSWER, {"judge": 0.0, "num_votes": 0.0, "agreement": 1.0})
        texts = {"question": prompt_text(response.prompt), "reference": reference, "response": answer}
        numbers = await self._votes(self._template, texts, self._read)
        votes = [(each - self.low) / (self.high - self.low) for each in numbers]
        reward = self.voting.merge(votes, "the response")
        agreement = sum(vote == reward for vote in votes) / len(votes)
        components = {"judge": sum(votes) / len(votes), "num_votes": float(len(votes)), "agreement": agreement}
        return RewardResult(reward, reward, components=components, extracted=shown(answer))


class JudgeReward(_SingleResponse):
    """1.0 if a judge says that a response is right, else 0.0, by majority of the votes.

    Args:
        judge: the judge, or settings for `settings.judge_from`.
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
        judge: the judge, or settings for `settings.judge_from`.
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
