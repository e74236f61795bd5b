"""Asks a reward model about preference data, many items at a time, the way an environment asks it about responses.

Each answer goes through `ModelReward` and `graded`, as in a rollout: the same messages, template, length policy and
errors. What could not be scored has an error and no score; it is never counted as wrong. `log.py` keeps the outcomes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.rewards._arguments import whole_number
from agentenv.rewards.grading import graded
from agentenv.rewards.judges.failures import JudgeMisaddressed
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import Conversation, Scored, Scorer, ready
from agentenv.rewards.types import Response, RewardResult, Status, is_finite
from agentenv.rm.rewardbench import is_tie
from agentenv.rm.rows import Candidate, Item
from agentenv.rm.specs import RewardModel

LIMIT_S = 3600.0
"""Longest that one answer may take, unless said otherwise; loading the model is not counted."""
_MAX_ERROR_CHARS = 500
_OF_SETTINGS = ("ConfigError", "MissingDependency", "JudgeMisaddressed")
"""What is raised where no item can have a score, as `graded` names it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reward model said of one item."""

    index: int
    item_id: str
    subset: str
    scores: tuple[float | None, ...]
    """Of each answer, the chosen ones first; raw. Of a comparison the points of the two, which sum to 1."""
    num_chosen: int
    num_tokens: tuple[int | None, ...] = ()
    truncated: tuple[bool, ...] = ()
    error: str = ""
    """Why not all of them have a score; empty where they have."""

    @property
    def known(self) -> tuple[float, ...] | None:
        """All scores; None where one is missing."""
        found = tuple(score for score in self.scores if score is not None)
        return found if len(found) == len(self.scores) and found else None

    @property
    def margin(self) -> float | None:
        """The best chosen answer's score less the best rejected one's."""
        scores = self.known
        return None if scores is None else max(scores[: self.num_chosen]) - max(scores[self.num_chosen :])

    @property
    def tie(self) -> bool:
        """Whether no answer was preferred."""
        return self.known is not None and is_tie(self.known, self.num_chosen)

    def to_dict(self) -> dict[str, Any]:
        """Its line in the log."""
        return {**asdict(self), "tie": self.tie}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The outcome of a line.

        Raises:
            DataError: the line is none of this version.
        """
        try:
            fields = {name: row[name] for name in cls.__dataclass_fields__}
            lists = {name: tuple(fields[name]) for name in ("scores", "num_tokens", "truncated")}
        except (KeyError, TypeError) as error:
            raise DataError(f"items.jsonl: expected an item of this version, got {row!r:.100}: {error}.") from error
        return cls(**{**fields, **lists})


class _Noted:
    """A scorer that remembers what it said last; one for each answer."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.said: Scored | None = None

    async def score(self, conversation: Conversation) -> Scored:
        """What the scorer says, and its errors."""
        self.said = await self._scorer.score(conversation)
        return self.said

    async def close(self) -> None:
        """Nothing: the scorer is another's."""


@dataclass(frozen=True, slots=True)
class _Rated:
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
    each: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """The outcome of every item, in order.

    Args:
        rm: what is asked.
        items: the comparisons.
        max_concurrent: most items at a time.
        limit_s: longest that one answer, or one comparison, may take.
        each: told of each outcome as soon as it is there.

    Raises:
        ConfigError: the reward model cannot be opened or cannot work with its settings, or compares pairs and an item
            is none.
        Exception: what `each` raised.
    """
    free = asyncio.Semaphore(whole_number("--max_concurrent", max_concurrent, low=1))
    if rm.comparer is not None and (several := [item.item_id for item in items if not item.is_pair]):
        raise ConfigError(
            f"--rm {rm.spec}: expected pairs for a judge that compares two answers, got item {several[0]!r} with more. "
            "Use judge-score:…, which scores each."
        )
    await ready(rm.scorer)  # first: a wrong setting is no failure of every item

    async def one(item: Item) -> Outcome:
        """The outcome of an item, once its turn has come."""
        async with free:
            outcome = await _outcome(rm, item, limit_s)
        each(outcome)
        return outcome

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(item)) for item in items]
    except ExceptionGroup as group:  # what `each` raised; it ended all
        raise group.exceptions[0] from group
    return [task.result() for task in running]


async def _outcome(rm: RewardModel, item: Item, limit_s: float) -> Outcome:
    if rm.comparer is not None:
        rated = await _compared(rm, item, limit_s)
    else:
        rated = list(await asyncio.gather(*(_rated(rm, candidate, limit_s) for candidate in item.candidates)))
    errors = [each.error for each in rated if each.error]
    return Outcome(
        index=item.index,
        item_id=item.item_id,
        subset=item.subset,
        scores=tuple(each.value for each in rated),
        num_chosen=item.num_chosen,
        num_tokens=tuple(each.num_tokens for each in rated),
        truncated=tuple(each.truncated for each in rated),
        error=errors[0][:_MAX_ERROR_CHARS] if errors else "",
    )


async def _rated(rm: RewardModel, candidate: Candidate, limit_s: float) -> _Rated:
    """The score of one answer, raw."""
    response = Response(candidate.text, prompt=candidate.prompt)
    if rm.scorer is None:
        assert rm.reward is not None
        result = await graded(rm.reward, response, limit_s=limit_s)
        return _Rated(result.reward, error=_why(result))
    noted = _Noted(rm.scorer)
    result = await graded(ModelReward(noted), response, limit_s=limit_s)
    if not result.status.valid or noted.said is None:
        return _Rated(None, error=_why(result))
    return _Rated(noted.said.value, noted.said.num_tokens, noted.said.truncated)


def _why(result: RewardResult) -> str:
    """Why there is no score: `data` is the item's fault, `infra` the model's; empty where there is one.

    Raises:
        ConfigError: neither's: nothing will have one with these settings.
    """
    kind, _, message = (result.detail or "").partition(": ")
    if not result.status.valid and kind in _OF_SETTINGS:
        raise ConfigError(message)
    kind = "data" if result.status is Status.LABEL else "infra"
    return "" if result.status.valid else f"{kind}: {result.detail}"


async def _compared(rm: RewardModel, item: Item, limit_s: float) -> list[_Rated]:
    """The points of the two answers."""
    assert rm.comparer is not None
    chosen, rejected = item.candidates
    try:
        async with asyncio.timeout(limit_s):
            points = await rm.comparer.compare(chosen.prompt, chosen.text, rejected.text)
    except (ConfigError, JudgeMisaddressed) as error:
        raise ConfigError(str(error)) from error
    except (AgentEnvError, TimeoutError) as error:
        return [_Rated(None, error=f"infra: {error or f'no verdict within {limit_s:g} s'}")] * 2
    if points is None or not is_finite(points):
        return [_Rated(None, error=f"infra: expected a verdict, got {points!r}")] * 2
    return [_Rated(points), _Rated(1.0 - points)]


# --- whether a score depends on its batch -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invariance:
    """The same conversations scored one at a time, and all at once."""

    num: int
    """Conversations that have a score both ways."""
    max_diff: float | None
    """The largest difference; None without one."""
    largest: float | None
    """The largest score, without its sign: what the difference is to be seen beside."""


async def invariance(scorer: Scorer, items: Sequence[Item], *, num: int = 16) -> Invariance:
    """How much scores depend on what else is scored at that time, on answers taken evenly from the items.

    Raises:
        ConfigError: the model cannot be opened.
    """
    answers = [candidate for item in items for candidate in item.candidates]
    step = max(1, len(answers) // max(1, num))
    conversations = [[*each.prompt, {"role": "assistant", "content": each.text}] for each in answers[::step][:num]]
    alone = [await _value(scorer, conversation) for conversation in conversations]
    together = await asyncio.gather(*(_value(scorer, conversation) for conversation in conversations))
    both = [(a, b) for a, b in zip(alone, together, strict=True) if a is not None and b is not None]
    if not both:
        return Invariance(0, None, None)
    return Invariance(len(both), max(abs(a - b) for a, b in both), max(abs(a) for a, _ in both))


async def _value(scorer: Scorer, conversation: Conversation) -> float | None:
    try:
        return (await scorer.score(conversation)).value
    except (DataError, InfraError):
        return None
