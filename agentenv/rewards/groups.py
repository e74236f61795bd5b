"""Rewards of whole groups, side by side: all responses to one prompt go to a GroupReward together.

Each group has its own deadline, from when its work starts, and its own outcome: one that is slow or fails costs the
others nothing. A group is what has the same key, a uid or the prompt's token ids (`group_keys`), never decoded text:
two rows may ask the same, and two prompts may read the same once their special tokens are gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentenv.deadlines import StepTimeout, bounded
from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.rewards._arguments import is_reward, number, one_of, whole_number
from agentenv.rewards.grading import graded_all, patience_s, within_bounds
from agentenv.rewards.group_function import FunctionGroupReward, against_reference
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult, Status

__all__ = [
    "Each",
    "FunctionGroupReward",
    "GroupGrade",
    "GroupOutcome",
    "GroupSizeError",
    "GroupedResults",
    "against_reference",
    "aligned",
    "check_group_sizes",
    "grade_groups",
    "graded_group",
    "group_keys",
    "stream_groups",
]

_LOG = logging.getLogger(__name__)

GROUP_LIMIT_S = 300.0
"""Longest that grading one group may take, unless said otherwise."""
SizeCheck = Literal["strict", "warn", "any"]
"""What becomes of groups of different sizes: an error, a line in the log, nothing."""


class GroupSizeError(DataError, AssertionError):
    """Groups have different sizes where they may not; an AssertionError in RM-Gallery's manager."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """How grading one group ended."""

    key: Hashable
    indices: tuple[int, ...]
    """Places of its responses in the batch."""
    status: Literal["ok", "timeout", "error"]
    """ok: its reward gave an answer, in which single responses may have failed; else none of them has a reward."""
    seconds: float
    """From when its work started."""
    detail: str = ""
    """For people: what went wrong."""


@dataclass(frozen=True, slots=True)
class GroupedResults:
    """A batch, graded."""

    results: tuple[RewardResult, ...]
    """One per response, in the order given; all have the same components, None where a response lacks one."""
    groups: tuple[GroupOutcome, ...]
    """In the order in which their keys first appear."""

    def metrics(self, prefix: str = "rewards/") -> dict[str, float]:
        """Counts of groups by outcome, of responses without a reward, and the slowest group's seconds, for logs."""
        statuses = [group.status for group in self.groups]
        return {
            f"{prefix}num_groups": float(len(statuses)),
            f"{prefix}num_groups_timeout": float(statuses.count("timeout")),
            f"{prefix}num_groups_error": float(statuses.count("error")),
            f"{prefix}num_invalid": float(sum(result.reward is None for result in self.results)),
            f"{prefix}slowest_group_s": max((group.seconds for group in self.groups), default=0.0),
        }


@dataclass(frozen=True, slots=True)
class GroupGrade:
    """The results of one group, and how they came about."""

    results: tuple[RewardResult, ...]
    status: Literal["ok", "timeout", "error"]
    seconds: float
    detail: str = ""


def group_keys(uids: Sequence[Any] | None = None, prompt_ids: Iterable[Sequence[int]] | None = None) -> list[Hashable]:
    """A key per response: of its uid where there are uids, else of its prompt's token ids.

    Args:
        uids: what the trainer calls the prompt of each response by; not None.
        prompt_ids: the prompts' ids, without padding.

    Raises:
        ConfigError: neither is given.
        DataError: a uid is missing, or none that can be compared.
    """
    if uids is None and prompt_ids is None:
        raise ConfigError("group_keys: expected uids or prompt_ids, got neither. Pass one of them.")
    if uids is None:
        assert prompt_ids is not None
        return [tuple(int(token) for token in ids) for ids in prompt_ids]
    wrong = [uid for uid in uids if uid is None or not isinstance(uid, Hashable) or uid != uid]
    if wrong:
        raise DataError(f"uid: expected text or a number, got {wrong[0]!r}. Give each prompt one.")
    return list(uids)


def check_group_sizes(keys: Sequence[Hashable], check: SizeCheck) -> None:
    """Say that groups have different sizes, as an estimator over groups may not be able to take.

    Raises:
        GroupSizeError: they have, under "strict"; in the words of RM-Gallery's manager.
        ConfigError: no such check.
    """
    one_of("group_size", check, ("strict", "warn", "any"))
    sizes = [len(indices) for indices in _members(keys).values()]
    if len(set(sizes)) < 2 or check == "any":
        return
    if check == "strict":
        raise GroupSizeError(f"Sample count must be same per group, current group_sizes: {sizes}")
    _LOG.warning("groups: expected as many responses in each, got between %d and %d", min(sizes), max(sizes))


async def grade_groups(
    reward: GroupReward,
    responses: Sequence[Response],
    keys: Sequence[Hashable],
    *,
    references: Mapping[Hashable, str] | None = None,
    limit_s: float = GROUP_LIMIT_S,
    max_concurrent: int = 64,
    group_size: SizeCheck = "any",
) -> GroupedResults:
    """A result per response; groups run side by side and none waits for another, beyond its turn.

    Args:
        reward: what judges a group.
        responses: of all groups, in any order.
        keys: the group of each response; see `group_keys`.
        references: by key, a response to compare a group's with; a group without one, or with an empty one, has none.
        limit_s: longest that one group may take, from when its work starts.
        max_concurrent: most groups at a time.
        group_size: see `check_group_sizes`.

    Raises:
        ConfigError: a limit is out of range, there is not one key per response, one cannot be compared, or the reward
            judges no groups.
        DataError: a reference is no text.
        GroupSizeError: groups have different sizes, under "strict".
    """
    check_group_sizes(keys, group_size)
    results: list[RewardResult] = [RewardResult.failed("not graded")] * len(responses)
    outcomes: dict[Hashable, GroupOutcome] = {}
    stream = stream_groups(
        reward, responses, keys, references=references, limit_s=limit_s, max_concurrent=max_concurrent
    )
    async with aclosing(stream) as groups:
        async for outcome, graded in groups:
            outcomes[outcome.key] = outcome
            for index, result in zip(outcome.indices, graded, strict=True):
                results[index] = result
    return GroupedResults(tuple(aligned(results)), tuple(outcomes[key] for key in _members(keys)))


async def stream_groups(
    reward: GroupReward,
    responses: Sequence[Response],
    keys: Sequence[Hashable],
    *,
    references: Mapping[Hashable, str] | None = None,
    limit_s: float = GROUP_LIMIT_S,
    max_concurrent: int = 64,
) -> AsyncGenerator[tuple[GroupOutcome, tuple[RewardResult, ...]], None]:
    """Each group's outcome and results as soon as they are there; what is left runs no longer than the generator.

    Raises:
        ConfigError, DataError: as `grade_groups`.
    """
    number("limit_s", limit_s, low=0.001)
    whole_number("max_concurrent", max_concurrent, low=1)
    if not hasattr(reward, "grade_group") or isinstance(reward, type):
        raise ConfigError(
            f"reward: expected a group reward, got {reward!r:.200}. Wrap one of single responses in Each."
        )
    if len(keys) != len(responses):
        raise ConfigError(f"keys: expected one for each of {len(responses)} responses, got {len(keys)}. Pass them all.")
    wrong = [each for each in (references or {}).values() if not isinstance(each, str | None)]
    if wrong:
        raise DataError(f"references: expected texts, got {wrong[0]!r:.200}. Pass what the reference says.")
    free = asyncio.Semaphore(max_concurrent)

    async def one(key: Hashable, indices: Sequence[int]) -> tuple[GroupOutcome, tuple[RewardResult, ...]]:
        """A group's; its time starts when its turn has come."""
        async with free:
            group, reference = [responses[index] for index in indices], (references or {}).get(key)
            grade = await graded_group(reward, group, reference, limit_s=limit_s)
            return GroupOutcome(key, tuple(indices), grade.status, grade.seconds, grade.detail), grade.results

    tasks = [asyncio.create_task(one(key, indices)) for key, indices in _members(keys).items()]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def graded_group(
    reward: GroupReward, responses: Sequence[Response], reference: str | None = None, *, limit_s: float = GROUP_LIMIT_S
) -> GroupGrade:
    """The results of one group; never raises for one, however its grader fails.

    Every response is LABEL where the reward cannot use the rows, and INFRA where it raised anything else, gave no
    answer within `limit_s`, or gave what is no result for each; one is INFRA whose reward is out of its own bounds.
    """
    started = time.perf_counter()
    work = bounded(reward.grade_group, list(responses), reference or None, limit_s=limit_s, flag="limit_s")
    answer: Any = (await asyncio.gather(work, return_exceptions=True))[0]
    seconds = time.perf_counter() - started
    if not isinstance(answer, BaseException) and _is_answer(answer, len(responses)):
        return GroupGrade(tuple(within_bounds(reward, result) for result in answer), "ok", seconds)
    if not isinstance(answer, BaseException):
        shown = repr(answer)[:200]
        answer = ContractError(
            f"{type(reward).__name__}: expected {len(responses)} results, got {shown}. Mend the reward."
        )
    status: Literal["timeout", "error"] = "timeout" if isinstance(answer, StepTimeout) else "error"
    plain = isinstance(answer, DataError | StepTimeout | ContractError)
    detail = (str(answer) if plain else f"{type(answer).__name__}: {answer}")[:500]
    failed = RewardResult.failed(detail, Status.LABEL if isinstance(answer, DataError) else Status.INFRA)
    return GroupGrade((failed,) * len(responses), status, seconds, detail)


class Each:
    """A Reward as a GroupReward: judges each response on its own, within `limit_s`; a reference changes nothing."""

    def __init__(self, reward: Reward, *, limit_s: float | None = None) -> None:
        """Raises ConfigError for what is no reward; `limit_s` is by default `grading.patience_s` of the reward."""
        is_reward("Each.reward", reward, "grade")
        self.reward, limit_s = reward, patience_s(reward) if limit_s is None else limit_s
        self.limit_s = number("Each.limit_s", limit_s, low=0.001)

    @property
    def bounds(self) -> tuple[float, float]:
        """Those of the reward."""
        return self.reward.bounds

    @property
    def component_names(self) -> tuple[str, ...]:
        """What the reward declares; nothing where it declares none."""
        return tuple(getattr(self.reward, "component_names", ()))

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """One result per response, in order; see `graded_all`."""
        return await graded_all(self.reward, responses, limit_s=self.limit_s)


def aligned(results: Sequence[RewardResult]) -> list[RewardResult]:
    """The results with the same components in the same order, None where one lacks it: tables need equal columns."""
    names = list(dict.fromkeys(name for result in results for name in result.components))
    return [
        result
        if list(result.components) == names
        else replace(result, components={name: result.components.get(name) for name in names})
        for result in results
    ]


def _members(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        if not isinstance(key, Hashable):
            raise ConfigError(f"keys: expected values that can be compared, got {key!r:.200}. Make them of group_keys.")
        members.setdefault(key, []).append(index)
    return members


def _is_answer(answer: Any, count: int) -> bool:
    known = isinstance(answer, Sequence) and len(answer) == count
    return known and all(isinstance(result, RewardResult) for result in answer)
