"""Calls rewards: a deadline that starts with the work, and whatever goes wrong becomes a result of one response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentenv.deadlines import StepTimeout, bounded
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.types import GroupReward, Response, Reward, RewardResult, Status

DEADLINE_S = 60.0
"""Longest that grading one response may take, unless said otherwise."""
MAX_CONCURRENT = 64
_ROUNDING = 1e-6


async def graded(reward: Reward, response: Response, *, limit_s: float = DEADLINE_S) -> RewardResult:
    """The result of one response; never raises for one, however its grader fails.

    LABEL where the reward cannot use the row; INFRA where it raised anything else, gave no answer within `limit_s`, or
    gave one outside of its own bounds. Waiting for a free worker or a place in the sandbox does not count.
    """
    try:
        result = await bounded(reward.grade, response, limit_s=limit_s, flag="limit_s")
    except DataError as error:
        return RewardResult.failed(str(error), Status.LABEL)
    except StepTimeout as error:
        return RewardResult.failed(str(error))
    except Exception as error:  # noqa: BLE001 - one response's grader must not end its batch; the result carries it
        return RewardResult.failed(f"{type(error).__name__}: {error}"[:500])
    return within_bounds(reward, result)


async def graded_all(
    reward: Reward, responses: Sequence[Response], *, limit_s: float = DEADLINE_S, max_concurrent: int = MAX_CONCURRENT
) -> list[RewardResult]:
    """One result per response, in order, `max_concurrent` at a time; see `graded`.

    Raises:
        ConfigError: `max_concurrent` is less than 1.
    """
    if max_concurrent < 1:
        raise ConfigError(f"max_concurrent: expected an integer >= 1, got {max_concurrent!r}. Change the value.")
    free = asyncio.Semaphore(max_concurrent)

    async def one(response: Response) -> RewardResult:
        """The result of a response; its time starts when its turn has come."""
        async with free:
            return await graded(reward, response, limit_s=limit_s)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(response)) for response in responses]
    return [task.result() for task in running]


def within_bounds(reward: Reward | GroupReward, result: RewardResult) -> RewardResult:
    """The result, or INFRA where its reward is outside of what the grader says it gives."""
    low, high = reward.bounds
    if result.reward is None or low - _ROUNDING <= result.reward <= high + _ROUNDING:
        return result
    return RewardResult.failed(f"{_name(reward)}: expected a reward in {low:g}..{high:g}, got {result.reward!r}")


def _name(reward: Reward | GroupReward) -> str:
    return type(reward).__name__
