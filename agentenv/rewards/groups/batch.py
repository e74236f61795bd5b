"""Grade many groups concurrently: all responses to one prompt go to a GroupReward together.

Each group has its own deadline, which starts with its work, and its own outcome: a slow or failing group does not
affect the others. Responses with equal keys form a group: a uid or the prompt's token ids (`group_keys`), never decoded
text, since two rows may ask the same, and two prompts may be equal without their special tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentenv._util.calls import StepTimeout, bounded
from agentenv.core.arguments import is_reward, number, one_of, whole_number
from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.rewards.grading import enforce_bounds, failed_by, grade_all, patience_s
from agentenv.rewards.loading import failure_of
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult

_LOG = logging.getLogger(__name__)

GROUP_LIMIT_S = 300.0
"""Default time limit for grading one group."""
SizeCheck = Literal["strict", "warn", "any"]
"""Reaction to groups of different sizes: an error, a log message, nothing."""


class GroupSizeError(DataError, AssertionError):
    """Groups have different sizes, which is not allowed here; an AssertionError in RM-Gallery's manager."""


@dataclass(frozen=True, slots=True)
class GroupResults:
    """The results of one group, and how grading it ended."""

    results: tuple[RewardResult, ...]
    status: Literal["ok", "timeout", "error"]
    """ok: its reward answered, although single responses may have failed; else none of them has a reward."""
    seconds: float
    """Time since its work started."""
    detail: str = ""
    """Human-readable reason of a failure."""
    key: Hashable = None
    indices: tuple[int, ...] = ()
    """Indices of its responses in the batch."""


@dataclass(frozen=True, slots=True)
class GroupedResults:
    """The results of a batch."""

    results: tuple[RewardResult, ...]
    """One per response, in order; all have the same components, None where a response lacks one."""
    groups: tuple[GroupResults, ...]
    """In the order in which their keys first appear."""

    def metrics(self, prefix: str = "rewards/") -> dict[str, float]:
        """Return counts of groups by status, of responses without a reward, and the slowest group's seconds."""
        statuses = [group.status for group in self.groups]
        return {
            f"{prefix}num_groups": float(len(statuses)),
            f"{prefix}num_groups_timeout": float(statuses.count("timeout")),
            f"{prefix}num_groups_error": float(statuses.count("error")),
            f"{prefix}num_invalid": float(sum(result.reward is None for result in self.results)),
            f"{prefix}slowest_group_s": max((group.seconds for group in self.groups), default=0.0),
        }


def group_keys(uids: Sequence[Any] | None, prompt_ids: Iterable[Sequence[int]]) -> list[Hashable]:
    """Return a key per response: its uid if there are uids, else its prompt's token ids.

    Args:
        uids: the trainer's identifier of each response's prompt; not None.
        prompt_ids: the prompts' token ids, without padding.

    Raises:
        DataError: a uid is missing, or cannot be compared.
    """
    if uids is None:
        return [tuple(int(token) for token in ids) for ids in prompt_ids]
    wrong = [uid for uid in uids if uid is None or not isinstance(uid, Hashable) or uid != uid]
    if wrong:
        raise DataError(f"uid: expected text or a number, got {wrong[0]!r}. Give each prompt one.")
    return list(uids)


def check_group_sizes(keys: Sequence[Hashable], check: SizeCheck) -> None:
    """Report groups of different sizes, which an estimator over groups may not support.

    Raises:
        GroupSizeError: sizes differ, under "strict"; with the message of RM-Gallery's manager.
        ConfigError: the check is unknown.
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
) -> GroupedResults:
    """Return a result per response; groups are graded concurrently.

    Args:
        reward: the reward of a group.
        responses: the responses of all groups, in any order.
        keys: the group of each response; see `group_keys`.
        references: by key, a response to compare the group's responses with; an empty one counts as none.
        limit_s: time limit of one group, from the start of its work.
        max_concurrent: maximum number of concurrent groups.

    Raises:
        ConfigError: a limit is out of range, there is not one key per response, one cannot be compared, or the reward
            does not grade groups.
        DataError: a reference is not a text.
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

    async def one(key: Hashable, indices: Sequence[int]) -> GroupResults:
        async with free:  # the time limit starts behind it
            group, reference = [responses[index] for index in indices], (references or {}).get(key)
            graded = await grade_group(reward, group, reference, limit_s=limit_s)
            return replace(graded, key=key, indices=tuple(indices))

    members = _members(keys)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(key, indices)) for key, indices in members.items()]
    graded = [task.result() for task in running]
    by_index = {index: each for group in graded for index, each in zip(group.indices, group.results, strict=True)}
    results = [by_index[index] for index in sorted(by_index)]
    names = list(dict.fromkeys(name for result in results for name in result.components))
    for index, result in enumerate(results):  # equal components in equal order, as tables need
        if list(result.components) != names:
            results[index] = replace(result, components={name: result.components.get(name) for name in names})
    return GroupedResults(tuple(results), tuple(graded))


async def grade_group(
    reward: GroupReward,
    responses: Sequence[Response],
    reference: str | None = None,
    *,
    limit_s: float = GROUP_LIMIT_S,
    flag: str = "limit_s",
) -> GroupResults:
    """Return the results of one group; never raises for a group, however its grader fails.

    All responses have the status LABEL if the reward cannot use the rows, ERROR if its own code is wrong: it raised
    (see `loading.failure_of`) or did not return one result for each, and INFRA if infrastructure failed or it did not
    answer within `limit_s`, which messages call `flag`. One whose reward is out of bounds is INFRA.
    """
    started = time.perf_counter()
    work = bounded(reward.grade_group, list(responses), reference or None, limit_s=limit_s, flag=flag)
    answer: Any = (await asyncio.gather(work, return_exceptions=True))[0]
    seconds = time.perf_counter() - started
    is_answer = isinstance(answer, Sequence) and len(answer) == len(responses)
    if is_answer and all(isinstance(result, RewardResult) for result in answer):
        return GroupResults(tuple(enforce_bounds(reward, result) for result in answer), "ok", seconds)
    if not isinstance(answer, BaseException):
        shown = repr(answer)[:200]
        answer = ContractError(f"{type(reward).__name__}: expected {len(responses)} results, got {shown}.")
    status: Literal["timeout", "error"] = "timeout" if isinstance(answer, StepTimeout) else "error"
    if isinstance(answer, Exception) and not isinstance(answer, StepTimeout):
        answer = failure_of(answer, type(reward).__name__)
    failed = failed_by(answer)
    return GroupResults((failed,) * len(responses), status, seconds, failed.detail)


class Each:
    """A Reward as a GroupReward: it grades each response on its own, within `limit_s`, and ignores the reference."""

    def __init__(self, reward: Reward, *, limit_s: float | None = None) -> None:
        """Raise ConfigError if it is not a reward; `limit_s` defaults to `grading.patience_s` of the reward."""
        is_reward("Each.reward", reward, "grade")
        self.reward = reward
        self.limit_s = number("Each.limit_s", patience_s(reward) if limit_s is None else limit_s, low=0.001)

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the reward."""
        return self.reward.bounds

    @property
    def component_names(self) -> tuple[str, ...]:
        """Names of components that the reward declares; empty if it declares none."""
        return tuple(getattr(self.reward, "component_names", ()))

    async def grade_group(self, responses: Sequence[Response], reference: str | None = None) -> list[RewardResult]:
        """Return one result per response, in order; see `grade_all`."""
        return await grade_all(self.reward, responses, limit_s=self.limit_s)


def _members(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        if not isinstance(key, Hashable):
            raise ConfigError(f"keys: expected values that can be compared, got {key!r:.200}. Use group_keys.")
        members.setdefault(key, []).append(index)
    return members
