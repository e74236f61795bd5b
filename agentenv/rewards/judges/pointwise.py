"""A response judged on its own: right or wrong, or a score on a scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards._arguments import number, shown
from agentenv.rewards._judge_text import prompt_text, scored, yes_or_no
from agentenv.rewards.judge import Asking, Judge
from agentenv.rewards.judges import templates
from agentenv.rewards.judges.voting import PATIENT, Voting, poll
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status


class PointwiseReward:
    """What a judge says of a response: a score on a scale, mapped onto 0..1, or yes and no, which are 1.0 and 0.0.

    Args:
        judge: who is asked.
        scale: the lowest and highest score; None for yes or no.
        criteria: what makes an answer good, for the judge; by default what `templates` says.
        needs_label: whether a row without a reference cannot be graded; else the judge goes by the question alone.
        voting: how often it is asked. Of yes and no what most votes say counts, whatever `combine` is.
        asking: how often and how long each vote is.

    A vote may take `attempts` times `limit_s` of `asking`: give `graded` and sums a limit to match.

    Components: `judge`, the mean of the votes; `num_votes`, those that gave a verdict; `agreement`, the share of them
    that say what the result says.

    Raises:
        ConfigError: the scale is none.
    """

    bounds = (0.0, 1.0)
    component_names = ("judge", "num_votes", "agreement")

    def __init__(
        self,
        judge: Judge,
        *,
        scale: tuple[float, float] | None = (1.0, 10.0),
        criteria: str | None = None,
        needs_label: bool = False,
        voting: Voting | None = None,
        asking: Asking = PATIENT,
    ) -> None:
        self.judge, self.scale, self.needs_label, self.asking = judge, scale, needs_label, asking
        self.voting = voting or Voting()
        if scale is None:
            self.voting = replace(self.voting, combine="majority")
            self._instructions = templates.filled(templates.VERIFY, criteria or templates.SAMENESS)
            self._ending, self._expected = 'End with "Verdict: YES" or "Verdict: NO".', "yes or no"
        else:
            low, high = (number("PointwiseReward.scale", end) for end in scale)
            if low >= high:
                raise ConfigError(f"PointwiseReward.scale: expected (low, high), got {scale!r}. Change the value.")
            criteria = criteria or templates.QUALITY
            self._instructions = templates.filled(templates.GRADE, criteria, low=low, high=high)
            self._ending, self._expected = f'End with "Score: N/{high:g}".', f"a score of {low:g}..{high:g}"

    async def grade(self, response: Response) -> RewardResult:
        """The result; NO_ANSWER, without asking, for a response that is empty or whose thinking has no end.

        Raises:
            DataError: there is no reference and one is needed, or it is no JSON.
            InfraError: too few votes gave a verdict, or as many say yes as no.
        """
        reference, answer = reference_text(response.label, needed=self.needs_label), final_text(response.text)
        if not answer:
            return RewardResult(0.0, 0.0, Status.NO_ANSWER, {"judge": 0.0, "num_votes": 0.0, "agreement": 1.0})
        texts = templates.texts_of(prompt_text(response.prompt), reference=reference, response=answer)
        messages = templates.asking_about(
            self._instructions, texts, ending=self._ending, max_chars=self.asking.max_chars
        )
        votes = await poll(
            self.judge, messages, self._reader(), asking=self.asking, voting=self.voting, expected=self._expected
        )
        reward = self.voting.combined(votes)
        if reward is None:
            raise InfraError(f"PointwiseReward: expected a majority, got {len(votes)} votes that are even. Ask more.")
        agreement = sum(vote == reward for vote in votes) / len(votes)
        components = {"judge": sum(votes) / len(votes), "num_votes": float(len(votes)), "agreement": agreement}
        return RewardResult(reward, reward, components=components, extracted=shown(answer))

    def _reader(self) -> Callable[[str], float | None]:
        return _verdict if self.scale is None else partial(_score, scale=self.scale)


def reference_text(label: Any, *, needed: bool) -> str:
    """A label as the text that a judge is shown; empty where there is none.

    Raises:
        DataError: there is none and one is needed, or it is neither text nor JSON.
    """
    if label is None or label == "":
        if needed:
            raise DataError("label: expected a reference for the judge, got none. Give the row one.")
        return ""
    try:
        return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"label: expected text or JSON, got {label!r:.200}. Correct the row.") from error


def _verdict(reply: str) -> float | None:
    verdict = yes_or_no(reply)
    return None if verdict is None else float(verdict)


def _score(reply: str, scale: tuple[float, float]) -> float | None:
    low, high = scale
    score = scored(reply, low, high)
    return None if score is None else (score - low) / (high - low)
