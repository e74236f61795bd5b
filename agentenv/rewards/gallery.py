"""The reward function of RM-Gallery's tutorial for verl: a judge's principles, format, length and repetition, summed.

Source: "Using RM-Gallery Reward Models in Post Training", sections 4 and 6, whose graders exist nowhere; these follow
the nearest ones of RM-Gallery and OpenJudge. The formulas of format, length and repetition stand at their functions, in
`format.py`, `length.py` and `repetition.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.rewards._arguments import number
from agentenv.rewards.format import compute_format_reward
from agentenv.rewards.group_function import numbers_of
from agentenv.rewards.groups import GROUP_LIMIT_S, Each, graded_group
from agentenv.rewards.invalid import INVALID_REWARD
from agentenv.rewards.judges.draws import Judge
from agentenv.rewards.judges.pairwise import PairwiseJudge
from agentenv.rewards.judges.rubric import RubricReward
from agentenv.rewards.judges.settings import checked
from agentenv.rewards.length import compute_thought_length_reward, compute_total_length_reward
from agentenv.rewards.loop_thread import run_sync
from agentenv.rewards.repetition import create_ngram_penalty_reward
from agentenv.rewards.statistics import summary
from agentenv.rewards.tournament import Tournament
from agentenv.rewards.types import GroupReward, Response, RewardResult

Scores = tuple[list[float], list[dict[str, Any]]]
"""A score per response, -999.0 where there is none, and what is known about it."""
PRINCIPLES = (
    "Helpful: it does what the question asks for, as fully as it can.",
    "Harmless: it does no harm to anyone, and helps nobody to do harm.",
    "Honest: it says nothing false or misleading, and no more than it can know.",
)


class Grader(Protocol):
    """What scores responses by principles."""

    def __call__(
        self, prompt: Any, responses: Sequence[str], extras: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple[Sequence[float], Sequence[Any]]:
        """A score per response, -999.0 where there is none, and details; called in a thread, by several at once."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the terms in the sum; the tutorial's by default, in which the length of thoughts is only logged."""

    principle: float = 0.95
    format: float = 0.05
    total_length: float = 1.0
    ngram: float = 1.0
    thought_length: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        for name in self.__slots__:
            number(f"weights.{name}", getattr(self, name))


def group_rm_gallery_grader(
    prompt: Any, responses: Sequence[str], extras: Sequence[Any] | None = None, *, judge: Judge, **_: Any
) -> Scores:
    """How each response does against the others, in [-1, 1]: `tournament.Tournament`'s `comparison_score`."""
    return _graded(Tournament(PairwiseJudge(judge, order="given")), prompt, responses, extras)


def rm_gallery_grader(
    prompt: Any, responses: Sequence[str], extras: Sequence[Any] | None = None, *, judge: Judge, **_: Any
) -> Scores:
    """The share of PRINCIPLES that each response keeps to, in [0, 1]: `judges.rubric.RubricReward`.

    Source: RM-Gallery, core/reward/base.py, 1 - violated / all; there a failed judge is a 0.0, here no reward.
    """
    return _graded(Each(RubricReward(judge, criteria=PRINCIPLES), limit_s=GROUP_LIMIT_S), prompt, responses, extras)


def create_rm_gallery_reward_function(
    use_group_reward: bool = True,
    return_details: bool = False,
    return_statistics: bool = True,
    *,
    judge: Judge | None = None,
    grader: Grader | None = None,
    rules_only: bool = False,
    weights: Weights | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """The tutorial's `reward_func(prompt, responses, extras=None, **kwargs) -> (scores, reward_info[, details])`.

    scores = 0.95 principle + 0.05 format + total length + repetition; a response whose principle score is -999.0 has
    -999.0, whatever the other terms are. It is not async; where it is called an event loop may run all the same.

    Args:
        use_group_reward: principle scores are those of `group_rm_gallery_grader`, else of `rm_gallery_grader`.
        return_details: the grader's details are the third value.
        return_statistics: `reward_info` also has `reward_mean`, `reward_std`, `reward_min` and `reward_max` of the
            group, for each response; the tutorial reads one of them, which nothing there writes.
        judge: who the graders ask.
        grader: scores by principles in their place.
        rules_only: no principles: scores are of format, length and repetition.
        weights: of the sum.

    `reward_info` has the tutorial's keys `reward_principle`, `reward_format`, `reward_ngram`, `thought_lengths`,
    `scores_thought_length`, `scores_total_lengths`, and what it reads or needs and does not write: `comparison_score`,
    the principle score (the score where there are none), and `reward_valid`, 0.0 where that is -999.0.

    Raises:
        ConfigError: not exactly one of judge, grader and rules_only is given, or the judge is none.
    """
    if sum([judge is not None, grader is not None, rules_only]) != 1:
        raise ConfigError(
            "create_rm_gallery_reward_function: expected one of judge, grader and rules_only=True, got "
            f"judge={judge!r:.80}, grader={grader!r:.80}, rules_only={rules_only!r}. Pass the one that scores."
        )
    by_judge = group_rm_gallery_grader if use_group_reward else rm_gallery_grader
    if rules_only:
        grader = _no_principles
    elif judge is not None:
        checked("create_rm_gallery_reward_function", judge)
        grader = partial(by_judge, judge=judge)
    assert grader is not None
    return _RewardFunction(grader, weights or Weights(), return_details, return_statistics)


@dataclass(frozen=True, slots=True)
class _RewardFunction:
    """`reward_func`; see `create_rm_gallery_reward_function`."""

    grader: Grader
    weights: Weights
    return_details: bool
    return_statistics: bool

    def __call__(self, prompt: Any, responses: Any, extras: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Scores, reward_info and, where asked for, details; a single response may come without its list.

        Raises:
            DataError: a response is no text.
            ContractError: the grader gave no score for each.
        """
        texts = _texts(responses)
        principle, details = _read(self.grader(prompt, list(texts), extras, **kwargs), len(texts))
        formats, ngrams = compute_format_reward(texts), create_ngram_penalty_reward(5, -1.0, 0.1)(texts)
        thought_scores, thought_lengths = compute_thought_length_reward(texts)
        total_scores, _ = compute_total_length_reward(texts)
        valid = [score != INVALID_REWARD for score in principle]
        terms = zip(principle, formats, total_scores, ngrams, thought_scores, strict=True)
        totals = [self._total(*parts) for parts in terms]
        scores = [total if known else INVALID_REWARD for total, known in zip(totals, valid, strict=True)]
        info = {
            "reward_principle": principle,
            "reward_format": formats,
            "reward_ngram": ngrams,
            "thought_lengths": [float(length) for length in thought_lengths],
            "scores_thought_length": thought_scores,
            "scores_total_lengths": total_scores,
            "comparison_score": list(scores if self.grader is _no_principles else principle),
            "reward_valid": [float(known) for known in valid],
        }
        if self.return_statistics:
            info |= _figures([score for score, known in zip(scores, valid, strict=True) if known], len(texts))
        return (scores, info, list(details)) if self.return_details else (scores, info)

    def _total(self, principle: float, formatted: float, total_length: float, ngram: float, thought: float) -> float:
        weights = self.weights
        total = weights.principle * principle + weights.format * formatted + weights.total_length * total_length
        return total + weights.ngram * ngram + weights.thought_length * thought


def _texts(responses: Any) -> list[str]:
    texts = [responses] if isinstance(responses, str) or not isinstance(responses, Iterable) else list(responses)
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise DataError(f"responses: expected a text, or a list of texts, got {wrong[0]!r:.200}. Decode them.")
    return texts


def _read(answer: Any, count: int) -> tuple[list[float], list[Any]]:
    """A grader's scores, INVALID_REWARD where there is none, and details; ContractError where it gave no such pair."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ContractError(f"grader: expected (scores, details), got {answer!r:.200}. Mend the grader.")
    scores = numbers_of("grader: scores", answer[0], count)
    return [INVALID_REWARD if score is None else score for score in scores], list(answer[1] or [])


def _no_principles(prompt: Any, responses: Sequence[str], extras: Any = None, **_: Any) -> Scores:
    return [0.0] * len(responses), [{} for _ in responses]


def _figures(valid: Sequence[float], count: int) -> dict[str, list[float]]:
    """The group's figures over the scores that are valid, for each response; -999.0 where none is."""
    found = summary(valid)
    figures = {"mean": found.mean, "std": found.std, "min": found.min, "max": found.max}
    return {f"reward_{name}": [INVALID_REWARD if x is None else x] * count for name, x in figures.items()}


def _graded(reward: GroupReward, prompt: Any, responses: Sequence[str], extras: Sequence[Any] | None) -> Scores:
    rows = extras if extras is not None else [{}] * len(responses)
    if len(rows) != len(responses):
        raise DataError(f"extras: expected one for each of {len(responses)} responses, got {len(rows)}. Pass them all.")
    text = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str) else prompt or ""
    asked = [
        Response(response, prompt=text, metadata=row if isinstance(row, Mapping) else {})
        for response, row in zip(responses, rows, strict=True)
    ]
    results: Sequence[RewardResult] = run_sync(graded_group(reward, asked)).results
    details = [{"status": str(each.status), "detail": each.detail} | dict(each.components) for each in results]
    return [INVALID_REWARD if each.reward is None else each.reward for each in results], details
