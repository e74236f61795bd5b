"""Call rewards with a deadline that starts with the work, and turn every error into a result of one response.

`collect_usage` collects what grading uses besides time: attempts, requests and tokens. A scorer and a judge count for
themselves, over all callers; here each count goes to its caller, however deep.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from agentenv._util.calls import StepTimeout, bounded
from agentenv.core.arguments import number, whole_number
from agentenv.errors import ContractError, DataError
from agentenv.rewards.loading import failure_of
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult, Status

_USAGE: ContextVar[dict[str, float] | None] = ContextVar("usage", default=None)
RM_RETRIED = "rm/num_retried"
"""Attempts at a reward model after the first."""


@contextmanager
def collect_usage() -> Iterator[dict[str, float]]:
    """Collect the usage of this task, and of those that start inside; by name."""
    usage: dict[str, float] = {}
    outer = _USAGE.set(usage)
    try:
        yield usage
    finally:
        _USAGE.reset(outer)


def add_usage(counts: Mapping[str, float]) -> None:
    """Add counts to what the enclosing `collect_usage` collects, if there is one."""
    usage = _USAGE.get()
    if usage is None:
        return
    for name, count in counts.items():  # zeros too: a run's mean is over the episodes that have a count
        usage[name] = usage.get(name, 0.0) + count


def with_usage(info: Mapping[str, float | str], usage: Mapping[str, float]) -> dict[str, float | str]:
    """Return `info` with the counts of `usage` added to numbers of the same names."""
    added = {name: num + was for name, num in usage.items() if not isinstance(was := info.get(name, 0.0), str)}
    return {**info, **added}


DEADLINE_S = 60.0
"""Time limit for grading one response, unless the caller or the reward sets another one; see `patience_s`."""
MAX_CONCURRENT = 64
_ROUNDING = 1e-6


def patience_s(reward: object) -> float:
    """Return the default time limit for grading one response: DEADLINE_S, or `reward.patience_s` if it is longer.

    Rewards that need longer have that attribute, such as judges, which retry.
    """
    wanted = getattr(reward, "patience_s", None)
    return max(DEADLINE_S, wanted) if isinstance(wanted, int | float) else DEADLINE_S


async def grade(reward: Reward, response: Response, *, limit_s: float | None = None) -> RewardResult:
    """Return the result of one response; never raises for a response, however its grader fails.

    The status is LABEL if the reward cannot use the row, and ERROR if its own code is wrong: it raised (see
    `loading.failure_of`), or returned no RewardResult. It is INFRA if infrastructure failed, nothing was returned
    within `limit_s` (default: `patience_s(reward)`), or a reward outside of its bounds was. Waiting for a free worker
    or a place in the sandbox does not count.
    """
    limit_s = patience_s(reward) if limit_s is None else limit_s
    text: Any = response.text
    if not isinstance(text, str):
        return RewardResult.failed(f"Response.text: expected a text, got {text!r:.100}. Pass what the model wrote.")
    try:
        return enforce_bounds(reward, await bounded(reward.grade, response, limit_s=limit_s, flag="limit_s"))
    except (DataError, ContractError, StepTimeout) as error:
        return failed_by(error)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        where = type(reward).__name__
        return RewardResult.failed(f"{where}: expected a result, got its own work cancelled. Fix the reward.")
    except Exception as error:  # noqa: BLE001 - one response's grader must not end its batch; the result carries it
        return failed_by(failure_of(error, type(reward).__name__))


def failed_by(error: BaseException) -> RewardResult:
    """Return the result of a reward that raised: LABEL for a DataError, ERROR for a ContractError, else INFRA."""
    kinds = {DataError: Status.LABEL, ContractError: Status.ERROR}
    status = next((status for kind, status in kinds.items() if isinstance(error, kind)), Status.INFRA)
    is_plain = isinstance(error, (*kinds, StepTimeout))
    return RewardResult.failed(str(error) if is_plain else f"{type(error).__name__}: {error}"[:500], status, error)


async def grade_all(
    reward: Reward,
    responses: Sequence[Response],
    *,
    limit_s: float | None = None,
    max_concurrent: int = MAX_CONCURRENT,
) -> list[RewardResult]:
    """Return one result per response, in order; up to `max_concurrent` are graded concurrently. See `grade`.

    Raises:
        ConfigError: a limit is out of range.
    """
    number("limit_s", DEADLINE_S if limit_s is None else limit_s, low=0.001, high=math.inf)
    free = asyncio.Semaphore(whole_number("max_concurrent", max_concurrent, low=1))

    async def grade_next(response: Response) -> RewardResult:
        async with free:  # the time limit starts behind it
            return await grade(reward, response, limit_s=limit_s)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(grade_next(response)) for response in responses]
    return [task.result() for task in running]


async def check_row(reward: Reward, row: Response) -> None:
    """Raise DataError if the reward cannot use a row, whose text is empty; for environments, before the first action.

    Rewards that can tell have a method `check_row(row)`; others pass.
    """
    check = getattr(reward, "check_row", None)
    if check is not None:
        await check(row)


def enforce_bounds(reward: Reward | GroupReward, result: Any) -> RewardResult:
    """Return the result, or one without a reward.

    The status is ERROR if it is not a RewardResult, or the reward has no bounds, and INFRA if it is outside of them.
    """
    where, bounds = type(reward).__name__, getattr(reward, "bounds", None)
    is_result = isinstance(result, RewardResult)
    if not is_result or not isinstance(bounds, tuple | list) or len(bounds) != 2:
        wrong = f"bounds (low, high), got {bounds!r:.200}" if is_result else f"a RewardResult, got {result!r:.200}"
        return RewardResult.failed(f"{where}: expected {wrong}. Fix the reward.", Status.ERROR)
    low, high = bounds
    if result.reward is None or low - _ROUNDING <= result.reward <= high + _ROUNDING:
        return result  # type: ignore[no-any-return]
    return RewardResult.failed(f"{where}: expected a reward in {low:g}..{high:g}, got {result.reward!r}.")
