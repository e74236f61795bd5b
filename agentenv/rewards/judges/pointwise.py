"""A response judged on its own: right or wrong, or a score on a scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentenv.errors import ConfigError
from agentenv.rewards._arguments import number, shown
from agentenv.rewards.judges.asking import Asker, Asking, Voting
from agentenv.rewards.judges.draws import Judge
from agentenv.rewards.judges.templates import GRADE, QUALITY, SAMENESS, VERIFY, Template, prompt_text, reference_text
from agentenv.rewards.judges.verdicts import scored, yes_or_no
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status


class _Single(Asker):
    """One question about one response, whose answer is a number from 0 to 1."""

    bounds = (0.0, 1.0)
    component_names = ("judge", "num_votes", "agreement")
    needs_label: bool
    _template: Template

    async def grade(self, response: Response) -> RewardResult:
        """The result; NO_ANSWER, without asking, for a response that is empty or whose thinking has no end.

        Raises:
            DataError: there is no reference and one is needed, it is no JSON, or the prompt is none.
            InfraError: too few votes gave a verdict, or a majority is asked for and there is none.
        """
        reference, answer = reference_text(response.label, needed=self.needs_label), final_text(response.text)
        if not answer:
            return RewardResult(0.0, 0.0, Status.NO_ANSWER, {"judge": 0.0, "num_votes": 0.0, "agreement": 1.0})
        texts = {"question": prompt_text(response.prompt), "reference": reference, "response": answer}
        votes = await self._votes(self._template, texts, self._read)
        reward = self.voting.combined(votes, "the response")
        agreement = sum(vote == reward for vote in votes) / len(votes)
        components = {"judge": sum(votes) / len(votes), "num_votes": float(len(votes)), "agreement": agreement}
        return RewardResult(reward, reward, components=components, extracted=shown(answer))

    def _read(self, reply: str) -> float | None:
        raise NotImplementedError


class JudgeReward(_Single):
    """Whether a judge says that a response is right: 1.0 or 0.0, as most votes say.

    Args:
        judge: who is asked.
        criteria: when it says yes; by default where the answer comes to the same as the reference.
        needs_label: whether a row without a reference cannot be graded; else the judge goes by the question alone.
        voting: how often it is asked; as many that say yes as no are no verdict, whatever `combine` is.
        asking: how often and how long each vote is.

    Components: `judge`, the mean of the votes; `num_votes`, those that gave a verdict; `agreement`, the share of them
    that say what the result says.

    Raises:
        ConfigError: an argument is none of its kind.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        criteria: str | None = None,
        needs_label: bool = True,
        voting: Voting | Mapping[str, Any] | None = None,
        asking: Asking | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, asking)
        self.voting, self.needs_label = replace(self.voting, combine="majority"), needs_label
        self._template = VERIFY.filled(criteria or SAMENESS)

    def _read(self, reply: str) -> float | None:
        verdict = yes_or_no(reply)
        return None if verdict is None else float(verdict)


class PointwiseReward(_Single):
    """A judge's score of a response on a scale, mapped onto 0..1.

    Args:
        judge: who is asked.
        scale: the lowest and highest score.
        criteria: what makes an answer good, for the judge; by default what `templates` says.
        needs_label: whether a row without a reference cannot be graded; else the judge goes by the question alone.
        voting: how often it is asked.
        asking: how often and how long each vote is.

    Components: as of `JudgeReward`.

    Raises:
        ConfigError: the scale is none, or another argument none of its kind.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        scale: tuple[float, float] = (1.0, 10.0),
        criteria: str | None = None,
        needs_label: bool = False,
        voting: Voting | Mapping[str, Any] | None = None,
        asking: Asking | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, voting, asking)
        ends = [number("PointwiseReward.scale", end) for end in scale] if isinstance(scale, tuple | list) else []
        if len(ends) != 2 or ends[0] >= ends[1]:
            raise ConfigError(f"PointwiseReward.scale: expected (low, high), got {scale!r:.200}. Change the value.")
        self.low, self.high = ends
        self.needs_label = needs_label
        self._template = GRADE.filled(criteria or QUALITY, low=self.low, high=self.high)

    def _read(self, reply: str) -> float | None:
        score = scored(reply, self.low, self.high)
        return None if score is None else (score - self.low) / (self.high - self.low)
