"""ModelReward: what a reward model says of a response, shifted, scaled and clipped into a reward.

Example:
    >>> reward = ModelReward(HFScorer("my-rm"), shift=-1.5, scale=0.5, clip=(-5.0, 5.0), score=(1.5, 2.0))
    >>> await reward.grade(Response("It is 4.", prompt=[{"role": "user", "content": "2+2?"}]))
    RewardResult(reward=1.1, score=0.86, …, components={'value': 3.7, 'truncated': 0.0, 'clipped': 0.0}, …)

`Normalized` brings rewards to a scale: by the mean and deviation of all so far, or by those of a calibration set.
Estimators that compare within groups (group_norm, rloo, dr_grpo) take the group's mean off themselves: for them a
running scale changes how far rewards are apart, and nothing else.

Example:
    >>> reward = Normalized(ModelReward(HFScorer("my-rm")), half_life=2000, clip=5.0, calibration=[1.2, -0.4, 3.1])
    >>> (await reward.grade(response)).components["raw"]
    1.7
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.core.arguments import is_finite, is_reward, number, one_of
from agentenv.core.types import Message
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.grading import patience_s
from agentenv.rewards.models.types import Conversation, RewardScorer
from agentenv.rewards.rules.text import final_text, without_special_tokens
from agentenv.rewards.types import Response, Reward, RewardResult, Status


class ModelReward:
    """`scale * (value + shift)`, clipped, where `value` is the raw number of a reward model.

    Args:
        scorer: the reward model, which the caller closes; or settings of `open_scorer`: `{"rm": "hf:PATH", …}`.
        shift: added first; `shift=-mean, scale=1 / std` normalizes as OpenRLHF's reward models do.
        scale: multiplied with then; not 0.
        clip: lowest and highest reward, or None.
        score: (middle, width) of the raw value's sigmoid, `1 / (1 + exp(-(value - middle) / width))`, which becomes the
            score in 0..1; None means no score, since the numbers of a reward model have no fixed scale.
        part: what of the response is judged: `final`, without its thinking, or `all`, thinking included.
        no_answer: reward of a response whose thinking has no end or that says nothing; None asks the model about an
            empty answer. The status is NO_ANSWER either way.
        text_prompt: what a prompt is that is text: `raw`, taken as it is, with the answer behind it; or `user`, a
            message of the user, for the model's own template.

    The model sees the prompt's raw messages and the answer as one more, never a text that the policy's template made.

    Components: `value` (None where the model was not asked), `truncated` and `clipped`, 0.0 or 1.0.
    """

    component_names = ("value", "truncated", "clipped")

    def __init__(  # noqa: PLR0913 - a scorer, or the two settings of one
        self,
        scorer: RewardScorer | None = None,
        *,
        shift: float = 0.0,
        scale: float = 1.0,
        clip: tuple[float, float] | None = None,
        score: tuple[float, float] | None = None,
        part: str = "final",
        no_answer: float | None = None,
        text_prompt: str = "raw",
        rm: str | None = None,
        rm_args: Mapping[str, Any] | None = None,
    ) -> None:
        where = type(self).__name__
        if scorer is None:
            from agentenv.rewards.models.factory import open_scorer

            options: Any = rm_args or {}
            is_object = isinstance(options, Mapping) and all(isinstance(key, str) for key in options)
            if not isinstance(rm, str) or not is_object:
                raise ConfigError(
                    f"model: expected a scorer; from settings: expected rm, as 'hf:PATH', and rm_args, an object, got "
                    f"{rm!r:.200} and {options!r:.200}."
                )
            scorer = open_scorer(rm, **options)
        self.scorer = scorer
        self._shift, self._scale = number(f"{where}.shift", shift), number(f"{where}.scale", scale)
        if not self._scale:
            raise ConfigError(f"{where}.scale: expected a number other than 0, got {scale!r}.")
        self._clip = None if clip is None else _pair(f"{where}.clip", clip)
        if self._clip is not None and self._clip[0] >= self._clip[1]:
            raise ConfigError(f"{where}.clip: expected (low, high), got {clip!r}.")
        self._sigmoid = None if score is None else _pair(f"{where}.score", score)
        if self._sigmoid is not None and not self._sigmoid[1]:
            raise ConfigError(f"{where}.score: expected (middle, width), width not 0, got {score!r}.")
        self._part = one_of(f"{where}.part", part, ("final", "all"))
        self._text_prompt = one_of(f"{where}.text_prompt", text_prompt, ("raw", "user"))
        low, high = self.bounds
        self._no_answer = None if no_answer is None else number(f"{where}.no_answer", no_answer, low=low, high=high)

    @property
    def bounds(self) -> tuple[float, float]:
        """`clip`, or infinite."""
        return self._clip or (-math.inf, math.inf)

    @property
    def patience_s(self) -> float:
        """Default time limit of grading for `graded`: that of the scorer."""
        return patience_s(self.scorer)

    async def grade(self, response: Response) -> RewardResult:
        """Return the reward; a response without an answer has the status NO_ANSWER.

        Raises:
            DataError: the model cannot score the conversation.
            InfraError: the model failed.
        """
        answer = (
            final_text(response.text, response.prompt)
            if self._part == "final"
            else without_special_tokens(response.text).strip()
        )
        if not answer and self._no_answer is not None:
            components: Mapping[str, float | None] = {"value": None, "truncated": 0.0, "clipped": 0.0}
            return RewardResult(self._no_answer, status=Status.NO_ANSWER, components=components)
        prompt, text = response.prompt, answer or ""
        conversation: Conversation
        if isinstance(prompt, str) and self._text_prompt == "raw":
            conversation = prompt + text
        else:
            asked: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            conversation = [*asked, {"role": "assistant", "content": text}]
        scored = await self.scorer.score(conversation)
        reward = self._scale * (scored.value + self._shift)
        if not is_finite(reward) and self._clip is None:
            raise InfraError(f"ModelReward: expected a finite reward, got {reward!r} of {scored.value!r}. Set clip.")
        low, high = self.bounds
        clipped = min(max(reward, low), high)
        score = None
        if self._sigmoid is not None:
            middle, width = self._sigmoid
            score = 0.5 * (1.0 + math.tanh((scored.value - middle) / (2.0 * width)))  # the sigmoid, without overflow
        return RewardResult(
            clipped,
            score=score,
            status=Status.OK if answer else Status.NO_ANSWER,
            components={
                "value": scored.value,
                "truncated": float(scored.truncated),
                "clipped": float(clipped != reward),
            },
            extracted=answer,
        )


def _pair(where: str, values: object) -> tuple[float, float]:
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise ConfigError(f"{where}: expected two numbers, got {values!r}.")
    return number(where, values[0]), number(where, values[1])


KINDS = ("running", "fixed")
_ADDED = ("raw", "clipped")


class RunningNorm:
    """Mean and deviation of all numbers so far, by Welford's algorithm.

    Source: Welford 1962, doi:10.1080/00401706.1962.10490022.

    Args:
        half_life: after so many further numbers one counts half; None forgets nothing.
    """

    def __init__(self, *, half_life: float | None = None) -> None:
        self._kept = 1.0 if half_life is None else 0.5 ** (1.0 / number("RunningNorm.half_life", half_life, low=1.0))
        self.num, self.mean, self._weight, self._squares = 0, 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Of the numbers as the whole population; 0.0 for fewer than two."""
        return math.sqrt(self._squares / self._weight) if self.num else 0.0

    def update(self, value: float) -> None:
        """Take a number in."""
        self.num += 1
        self._weight = self._weight * self._kept + 1.0
        away = value - self.mean
        self.mean += away / self._weight
        self._squares = self._squares * self._kept + away * (value - self.mean)


class Normalized:
    """A reward in deviations from a mean, clipped; both are those of the rewards so far, or of a calibration set.

    Args:
        reward: what is scaled, or settings for `registry.reward_from`.
        kind: `running` takes every reward in, then scales it; `fixed` is the calibration set's scale for good, the same
            for a response whenever it comes.
        half_life: of `running`: after so many further rewards one counts half, as a policy that learns has others.
        calibration: raw rewards to begin with, in the order in which they came; `fixed` needs two that differ.
        clip: most that a reward may be away from zero.

    A response without a reward stays one, and enters no statistics. Until there are two different rewards every reward
    is 0. Components are those of `reward`, with `raw` before the scaling, and `clipped`, 0.0 or 1.0. What `running`
    gives depends on the order in which responses end: write `raw` down to compare runs.
    """

    def __init__(
        self,
        reward: Reward | str | Mapping[str, Any],
        *,
        kind: str = "running",
        half_life: float | None = None,
        calibration: Sequence[float] = (),
        clip: float = 10.0,
    ) -> None:
        if isinstance(reward, str | Mapping):
            from agentenv.rewards.registry import reward_from

            reward = reward_from(reward)
        is_reward("Normalized.reward", reward, "grade")
        self.reward: Reward = reward
        self._running = one_of("Normalized.kind", kind, KINDS) == "running"
        self._clip = number("Normalized.clip", clip, low=1e-6)
        if not isinstance(calibration, list | tuple):
            raise ConfigError(f"Normalized.calibration: expected numbers, got {calibration!r:.200}. Pass a list.")
        self.norm = RunningNorm(half_life=half_life)
        """Of the rewards so far."""
        for value in calibration:
            self.norm.update(number("Normalized.calibration", value))
        if not self._running and not self.norm.std:
            raise ConfigError(
                "Normalized.calibration: expected at least two different rewards for kind 'fixed', got "
                f"{calibration!r:.200}. Grade some responses first."
            )
        self._lock = threading.Lock()  # guards the norm: event loops of several threads may share a reward

    @property
    def bounds(self) -> tuple[float, float]:
        """`clip` to both sides."""
        return -self._clip, self._clip

    @property
    def patience_s(self) -> float:
        """The reward's own."""
        return patience_s(self.reward)

    @property
    def component_names(self) -> tuple[str, ...]:
        """What the reward declares, and `raw` and `clipped`."""
        return tuple(dict.fromkeys([*getattr(self.reward, "component_names", ()), *_ADDED]))

    async def grade(self, response: Response) -> RewardResult:
        """Return the result with the reward scaled; score, status and the rest are unchanged.

        Raises:
            DataError, InfraError: what the reward raises.
        """
        result = await self.reward.grade(response)
        if result.reward is None:
            return replace(result, components={**result.components, "raw": None, "clipped": None})
        with self._lock:
            if self._running:
                self.norm.update(result.reward)
            mean, std = self.norm.mean, self.norm.std
        scaled = (result.reward - mean) / std if std else 0.0
        reward = min(max(scaled, -self._clip), self._clip)
        components = {**result.components, "raw": result.reward, "clipped": float(reward != scaled)}
        return replace(result, reward=reward, components=components)
