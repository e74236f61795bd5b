"""The evaluation of a reward model on preference data, many items concurrently.

Each answer goes through `ModelReward` and `graded`, as in a rollout: the same messages, template, length policy and
errors. An item that could not be scored has an error and no score; it never counts as wrong. `log.py` stores outcomes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from agentenv.core.arguments import is_finite, whole_number
from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.rewards.evaluation.rewardbench import is_tie
from agentenv.rewards.evaluation.rows import Candidate, Item
from agentenv.rewards.evaluation.specs import RewardModel
from agentenv.rewards.grading import grade
from agentenv.rewards.groups.tournament import Comparer
from agentenv.rewards.judges.protocol import JudgeMisaddressed
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import Conversation, RewardScorer, Scored, ready
from agentenv.rewards.types import Response, RewardResult, Status

LIMIT_S = 3600.0
"""Default time limit per answer, without the time to load the model."""
_MAX_ERROR_CHARS = 500
_CONFIGURATION_ERRORS = ("ConfigError", "MissingDependency", "JudgeMisaddressed")
"""Errors that affect all items, by the names that `graded` reports."""


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The scores of one item."""

    index: int
    item_id: str
    subset: str
    scores: tuple[float | None, ...]
    """Raw score of each answer, the chosen ones first. A comparison has the answers' points, which sum to 1."""
    num_chosen: int
    num_tokens: tuple[int | None, ...] = ()
    truncated: tuple[bool, ...] = ()
    error: str = ""
    """The reason why a score is missing; empty if none is."""

    @property
    def known(self) -> tuple[float, ...] | None:
        """All scores; None if one is missing."""
        scores = tuple(score for score in self.scores if score is not None)
        return scores if len(scores) == len(self.scores) and scores else None

    @property
    def tie(self) -> bool:
        """Whether neither side was preferred."""
        return self.known is not None and is_tie(self.known, self.num_chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome's line in the log."""
        return {**asdict(self), "tie": self.tie}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Return the outcome of a log line.

        Raises:
            DataError: another version wrote the line.
        """
        try:
            fields = {name: row[name] for name in cls.__dataclass_fields__}
            lists = {name: tuple(fields[name]) for name in ("scores", "num_tokens", "truncated")}
        except (KeyError, TypeError) as error:
            raise DataError(f"items.jsonl: expected an item of this version, got {row!r:.100}: {error}.") from error
        return cls(**{**fields, **lists})


class _RecordingScorer:
    """A scorer that records its last result; each answer has its own."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self.result: Scored | None = None

    async def score(self, conversation: Conversation) -> Scored:
        """Return the wrapped scorer's result."""
        self.result = await self._scorer.score(conversation)
        return self.result

    async def close(self) -> None:
        """Do nothing: the caller closes the wrapped scorer."""


@dataclass(frozen=True, slots=True)
class _AnswerScore:
    value: float | None
    num_tokens: int | None = None
    truncated: bool = False
    error: str = ""


async def evaluate(
    rm: RewardModel,
    items: Sequence[Item],
    *,
    max_concurrent: int = 64,
    limit_s: float = LIMIT_S,
    on_outcome: Callable[[ItemOutcome], None] = lambda _: None,
) -> list[ItemOutcome]:
    """Return the outcomes of all items, in order.

    Args:
        rm: the reward model, reward or judge.
        items: the comparisons.
        max_concurrent: items evaluated concurrently.
        limit_s: time limit per answer or comparison.
        on_outcome: called with each outcome as soon as it is known.

    Raises:
        ConfigError: the reward model cannot be loaded or has wrong settings, or it compares pairs and an item is not a
            pair.
        Exception: raised by `on_outcome`.
    """
    free = asyncio.Semaphore(whole_number("--max_concurrent", max_concurrent, low=1))
    if rm.comparer is not None and (several := [item.item_id for item in items if not item.is_pair]):
        raise ConfigError(
            f"--rm {rm.spec}: expected pairs for a judge that compares two answers, got item {several[0]!r} with more. "
            "Use judge-score:…, which scores each answer."
        )
    await ready(rm.scorer)  # first, so that a wrong setting is raised once instead of failing every item

    async def one(item: Item) -> ItemOutcome:
        async with free:
            if rm.comparer is not None:
                rated = await _compare(rm.comparer, item, limit_s)
            else:
                rated = await asyncio.gather(*(_score_answer(rm, each, limit_s) for each in item.candidates))
        outcome = ItemOutcome(
            index=item.index,
            item_id=item.item_id,
            subset=item.subset,
            scores=tuple(each.value for each in rated),
            num_chosen=item.num_chosen,
            num_tokens=tuple(each.num_tokens for each in rated),
            truncated=tuple(each.truncated for each in rated),
            error=next((each.error for each in rated if each.error), "")[:_MAX_ERROR_CHARS],
        )
        on_outcome(outcome)
        return outcome

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(item)) for item in items]
    except ExceptionGroup as group:  # raised by `on_outcome`
        raise group.exceptions[0] from group
    return [task.result() for task in running]


async def _score_answer(rm: RewardModel, candidate: Candidate, limit_s: float) -> _AnswerScore:
    """Return the raw score of one answer."""
    response = Response(candidate.text, prompt=candidate.prompt)
    if rm.scorer is None:
        assert rm.reward is not None
        result = await grade(rm.reward, response, limit_s=limit_s)
        return _AnswerScore(result.reward, error=_error_text(result))
    recording = _RecordingScorer(rm.scorer)
    result = await grade(ModelReward(recording), response, limit_s=limit_s)
    scored = recording.result
    if not result.status.valid or scored is None:
        return _AnswerScore(None, error=_error_text(result))
    return _AnswerScore(scored.value, scored.num_tokens, scored.truncated)


def _error_text(result: RewardResult) -> str:
    """Return why an item has no score, "" if it has one.

    `data` is an error of the item, `contract` one of the reward's code, and `infra` one of the model.

    Raises:
        ConfigError: the settings are wrong, so that no item can have a score.
    """
    kind, _, message = (result.detail or "").partition(": ")
    if not result.status.valid and kind in _CONFIGURATION_ERRORS:
        raise ConfigError(message)
    kind = {Status.LABEL: "data", Status.ERROR: "contract"}.get(result.status, "infra")
    return "" if result.status.valid else f"{kind}: {result.detail}"


async def _compare(comparer: Comparer, item: Item, limit_s: float) -> list[_AnswerScore]:
    """Return the points of the two answers."""
    chosen, rejected = item.candidates
    try:
        async with asyncio.timeout(limit_s):
            points = await comparer.compare(chosen.prompt, chosen.text, rejected.text)
    except (ConfigError, JudgeMisaddressed) as error:
        raise ConfigError(str(error)) from error
    except (AgentEnvError, TimeoutError) as error:
        return [_AnswerScore(None, error=f"infra: {error or f'no verdict within {limit_s:g} s'}")] * 2
    if points is None or not is_finite(points):
        return [_AnswerScore(None, error=f"infra: expected a verdict, got {points!r}")] * 2
    return [_AnswerScore(points), _AnswerScore(1.0 - points)]
