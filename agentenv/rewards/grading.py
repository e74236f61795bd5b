"""Calls rewards: a deadline that starts with the work, and whatever goes wrong becomes a result of one response."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from agentenv.deadlines import StepTimeout, bounded
from agentenv.errors import DataError
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult, Status

DEADLINE_S = 60.0
"""Longest that grading one response may take, unless its caller or the reward says otherwise; see `patience_s`."""
MAX_CONCURRENT = 64
_ROUNDING = 1e-6
_FAILURES: ContextVar[list[Exception] | None] = ContextVar("failures", default=None)


def patience_s(reward: object) -> float:
    """How long grading one response may take where no caller says: DEADLINE_S, or `reward.patience_s` if it is more.

    Rewards have that attribute that need longer, such as judges, who are asked again.
    """
    wanted = getattr(reward, "patience_s", None)
    return max(DEADLINE_S, wanted) if isinstance(wanted, int | float) else DEADLINE_S


@contextmanager
def failures() -> Iterator[list[Exception]]:
    """What rewards that are graded in here raise, parts of sums too, of which results have the texts alone."""
    found: list[Exception] = []
    outer = _FAILURES.set(found)
    try:
        yield found
    finally:
        _FAILURES.reset(outer)


async def graded(reward: Reward, response: Response, *, limit_s: float | None = None) -> RewardResult:
    """The result of one response; never raises for one, however its grader fails.

    LABEL where the reward cannot use the row; INFRA where it raised anything else, gave no result within `limit_s` (by
    default `patience_s(reward)`), or gave one outside of its own bounds. Waiting for a free worker or a place in the
    sandbox does not count.
    """
    limit_s = patience_s(reward) if limit_s is None else limit_s
    text: Any = response.text
    if not isinstance(text, str):
        return RewardResult.failed(f"Response.text: expected a text, got {text!r:.100}. Give what the model wrote.")
    try:
        return within_bounds(reward, await bounded(reward.grade, response, limit_s=limit_s, flag="limit_s"))
    except DataError as error:
        return RewardResult.failed(str(error), Status.LABEL)
    except StepTimeout as error:
        return RewardResult.failed(str(error))
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return RewardResult.failed(f"{_name(reward)}: expected a result, got its own work cancelled. Mend the reward.")
    except Exception as error:  # noqa: BLE001 - one response's grader must not end its batch; the result carries it
        if (found := _FAILURES.get()) is not None:
            found.append(error)
        return RewardResult.failed(f"{type(error).__name__}: {error}"[:500])


async def graded_all(
    reward: Reward,
    responses: Sequence[Response],
    *,
    limit_s: float | None = None,
    max_concurrent: int = MAX_CONCURRENT,
) -> list[RewardResult]:
    """One result per response, in order, `max_concurrent` at a time; see `graded`.

    Raises:
        ConfigError: a limit is out of range.
    """
    number("limit_s", DEADLINE_S if limit_s is None else limit_s, low=0.001, high=math.inf)
    free = asyncio.Semaphore(whole_number("max_concurrent", max_concurrent, low=1))

    async def one(response: Response) -> RewardResult:
        """The result of a response; its time starts when its turn has come."""
        async with free:
            return await graded(reward, response, limit_s=limit_s)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(response)) for response in responses]
    return [task.result() for task in running]


def within_bounds(reward: Reward | GroupReward, result: Any) -> RewardResult:
    """The result; INFRA where it is none, or its reward is outside of what the grader says it gives."""
    bounds = getattr(reward, "bounds", None)
    if not isinstance(result, RewardResult):
        return RewardResult.failed(f"{_name(reward)}: expected a RewardResult, got {result!r:.200}. Mend the reward.")
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        return RewardResult.failed(f"{_name(reward)}: expected bounds (low, high), got {bounds!r:.200}. Mend it.")
    if result.reward is None or bounds[0] - _ROUNDING <= result.reward <= bounds[1] + _ROUNDING:
        return result
    low, high = bounds
    return RewardResult.failed(
        f"{_name(reward)}: expected a reward in {low:g}..{high:g}, got {result.reward!r}. Mend it, or its bounds."
    )


def _name(reward: Reward | GroupReward) -> str:
    return type(reward).__name__
