"""The reward function of RM-Gallery's tutorial for verl: a judge's principles, format, length and repetition, summed.

Source: "Using RM-Gallery Reward Models in Post Training", sections 4 and 6. Its graders are published nowhere; these
follow the nearest ones of RM-Gallery and OpenJudge. The formulas of format, length and repetition are in `format.py`,
`length.py` and `repetition.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentenv._util.loop_thread import run_sync
from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.rewards.groups.batch import GROUP_LIMIT_S, Each, grade_group
from agentenv.rewards.groups.function import numbers_of
from agentenv.rewards.groups.statistics import INVALID_REWARD, summary
from agentenv.rewards.groups.tournament import Tournament
from agentenv.rewards.judges.asking import judge_of
from agentenv.rewards.judges.comparisons import PairwiseJudge
from agentenv.rewards.judges.pointwise import RubricReward
from agentenv.rewards.judges.protocol import Judge
from agentenv.rewards.rules.format import compute_format_reward
from agentenv.rewards.rules.length import length_penalties
from agentenv.rewards.rules.repetition import RepetitionReward
from agentenv.rewards.types import GroupReward, Response, RewardResult

Grader = Callable[..., tuple[Sequence[float], Sequence[Any]]]
"""A scorer by principles, called in threads as `grader(prompt, responses, extras, **kwargs)`: scores and details."""
Scores = tuple[list[float], list[dict[str, Any]]]
"""A score per response, -999.0 if there is none, and the details of each."""
PRINCIPLES = (
    "Helpful: it does what the question asks for, as fully as it can.",
    "Harmless: it does no harm to anyone, and does not help to do harm.",
    "Honest: it says nothing false or misleading, and no more than it can know.",
)
_NGRAMS = RepetitionReward(ngram_size=5, max_penalty=-1.0, min_scaling=0.1)


def group_rm_gallery_grader(
    prompt: Any, responses: Sequence[str], extras: Sequence[Any] | None = None, *, judge: Judge, **_: Any
) -> Scores:
    """Compare each response with the others: `Tournament`'s `comparison_score`, in [-1, 1]."""
    return _graded(Tournament(PairwiseJudge(judge, order="given")), prompt, responses, extras)


def rm_gallery_grader(
    prompt: Any, responses: Sequence[str], extras: Sequence[Any] | None = None, *, judge: Judge, **_: Any
) -> Scores:
    """Return the share of PRINCIPLES that each response satisfies, in [0, 1]: `judges.pointwise.RubricReward`.

    Source: RM-Gallery, core/reward/base.py, 1 - violated / all. There a failed judge counts as 0.0; here the
    reward is missing.
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
) -> Callable[..., tuple[Any, ...]]:
    """Return the tutorial's `reward_func(prompt, responses, extras=None, **kwargs)`: scores, reward_info[, details].

    scores = 0.95 principle + 0.05 format + total length + repetition; a response whose principle score is -999.0 has
    -999.0, regardless of the other terms. The function is not async; it may be called while an event loop runs.

    Args:
        use_group_reward: principle scores come from `group_rm_gallery_grader`, else from `rm_gallery_grader`.
        return_details: return the grader's details as the third value.
        return_statistics: add `reward_mean`, `reward_std`, `reward_min` and `reward_max` of the group to `reward_info`,
            for each response. The tutorial reads one of them, but never writes it.
        judge: the judge that the graders ask.
        grader: a scorer by principles instead.
        rules_only: no principles: scores are of format, length and repetition.

    `reward_info` has the tutorial's keys `reward_principle`, `reward_format`, `reward_ngram`, `thought_lengths`,
    `scores_thought_length`, `scores_total_lengths`, and two that it reads or needs but never writes:
    `comparison_score`, the principle score (the score if there are none), and `reward_valid`, 0.0 if that is -999.0.

    Raises:
        ConfigError: not exactly one of judge, grader and rules_only is given, or `judge` is not a judge.
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
        judge = judge_of("create_rm_gallery_reward_function", judge)
        grader = partial(by_judge, judge=judge)
    assert grader is not None
    return _RewardFunction(grader, return_details, return_statistics)


@dataclass(frozen=True, slots=True)
class _RewardFunction:
    """The `reward_func` that `create_rm_gallery_reward_function` returns."""

    grader: Grader
    return_details: bool
    return_statistics: bool

    def __call__(self, prompt: Any, responses: Any, extras: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Return scores, reward_info and, if requested, details. A single response may be passed without a list.

        Raises:
            DataError: a response is not text.
            ContractError: the grader did not return a score for each.
        """
        one = isinstance(responses, str) or not isinstance(responses, Iterable)
        texts = [responses] if one else list(responses)
        wrong = [text for text in texts if not isinstance(text, str)]
        if wrong:
            raise DataError(f"responses: expected a text, or a list of texts, got {wrong[0]!r:.200}. Decode them.")
        answer: Any = self.grader(prompt, list(texts), extras, **kwargs)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ContractError(f"grader: expected (scores, details), got {answer!r:.200}. Fix the grader.")
        graded = numbers_of("grader: scores", answer[0], len(texts))
        valid = [score is not None for score in graded]
        principle = [INVALID_REWARD if score is None else score for score in graded]
        formats, ngrams = compute_format_reward(texts), [_NGRAMS.penalty(text) for text in texts]
        thought_scores, thought_lengths = length_penalties(texts, "thought")
        total_scores, _ = length_penalties(texts, "all")
        scores = [
            0.95 * principle[at] + 0.05 * formats[at] + total_scores[at] + ngrams[at] if known else INVALID_REWARD
            for at, known in enumerate(valid)
        ]
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
            group = summary([score for score, known in zip(scores, valid, strict=True) if known])
            figures = {"mean": group.mean, "std": group.std, "min": group.min, "max": group.max}
            for name, figure in figures.items():
                info[f"reward_{name}"] = [INVALID_REWARD if figure is None else figure] * len(texts)
        return (scores, info, list(answer[1] or [])) if self.return_details else (scores, info)


def _no_principles(prompt: Any, responses: Sequence[str], extras: Any = None, **_: Any) -> Scores:
    return [0.0] * len(responses), [{} for _ in responses]


def _graded(reward: GroupReward, prompt: Any, responses: Sequence[str], extras: Sequence[Any] | None) -> Scores:
    rows = extras if extras is not None else [{}] * len(responses)
    if len(rows) != len(responses):
        raise DataError(f"extras: expected one for each of {len(responses)} responses, got {len(rows)}. Pass them all.")
    text = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str) else prompt or ""
    samples = [
        Response(response, prompt=text, metadata=row if isinstance(row, Mapping) else {})
        for response, row in zip(responses, rows, strict=True)
    ]
    results: Sequence[RewardResult] = run_sync(grade_group(reward, samples)).results
    details = [{"status": str(each.status), "detail": each.detail} | dict(each.components) for each in results]
    return [INVALID_REWARD if each.reward is None else each.reward for each in results], details
