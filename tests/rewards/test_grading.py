"""What a reward may give, and what becomes of a grader that fails."""

import asyncio
import math

import pytest

from agentenv._util.calls import waiting
from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.rewards.grading import grade, grade_all
from agentenv.rewards.types import Response, RewardResult, Status
from tests.waits import until


class Scripted:
    """A reward that does what it is told by the response's text."""

    bounds = (0.0, 1.0)

    def __init__(self):
        self.most_at_once = self.at_once = 0

    async def grade(self, response):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            match response.text:
                case "label":
                    raise DataError("label: expected a number, got None. Give one.")
                case "down":
                    raise InfraError("judge: expected an answer, got status 500. Retry.")
                case "bug":
                    return 1 / 0
                case "queue":
                    with waiting():
                        await asyncio.sleep(600)
                case "late":
                    raise TimeoutError("the read operation timed out")
                case "hang":
                    await asyncio.sleep(3600)
                case "high":
                    return RewardResult(1.5)
                case "number":
                    return 1.0
                case "nothing":
                    return None
                case "cancelled":
                    raise asyncio.CancelledError
            return RewardResult(1.0, 1.0)
        finally:
            self.at_once -= 1


@pytest.mark.parametrize(
    ("reward", "options", "says"),
    [
        *((reward, {}, "RewardResult.reward: expected a finite number") for reward in (None, math.nan, "1", 10**400)),
        (0.0, {"status": Status.INFRA}, "expected None"),
        (1.0, {"score": 1.1}, "score"),
        (1.0, {"score": math.nan}, "score"),
        (1.0, {"components": {"format": math.nan}}, r"components\['format'\]"),
    ],
)
def test_a_result_holds_finite_numbers_and_none_of_a_failed_grader(reward, options, says):
    with pytest.raises(ContractError, match=says):
        RewardResult(reward, **options)
    assert RewardResult.failed("the judge is down", Status.LABEL).reward is None
    assert RewardResult(1.0, components={"judge": None, "format": -2.0}).components["judge"] is None


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("label", Status.LABEL, "expected a number, got None"),
        ("down", Status.INFRA, "InfraError: judge: expected an answer"),
        ("bug", Status.ERROR, f"Scripted: expected a reward, got ZeroDivisionError: division by zero at {__file__}:"),
        ("hang", Status.INFRA, "Scripted.grade: expected an answer within 0.05 s, got none. Raise limit_s."),
        ("late", Status.INFRA, "TimeoutError: the read operation timed out"),
        ("high", Status.INFRA, "expected a reward in 0..1, got 1.5"),
        ("number", Status.ERROR, "Scripted: expected a RewardResult, got 1.0"),
        ("nothing", Status.ERROR, "Scripted: expected a RewardResult, got None"),
        ("cancelled", Status.INFRA, "Scripted: expected a result, got its own work cancelled"),
    ],
)
async def test_any_outcome_of_a_grader_is_a_typed_result_without_a_number(text, status, says):
    result = await grade(Scripted(), Response(text), limit_s=0.05 if text == "hang" else 60.0)
    assert (result.reward, result.score, result.status) == (None, None, status)
    assert says in result.detail
    error = result.error("Essay.step", retry_step=True)
    assert isinstance(error, InfraError) == getattr(error, "retry_step", False) == (status is Status.INFRA)


def test_one_failure_costs_the_others_of_a_batch_nothing_and_their_order_is_kept(virtual_clock):
    texts = ["a", "bug", "b", "hang", "label", "cancelled", "number", "c"]
    results = virtual_clock.run(grade_all(Scripted(), [Response(text) for text in texts], limit_s=60.0))
    assert [result.reward for result in results] == [1.0, None, 1.0, None, None, None, None, 1.0]


@pytest.mark.parametrize("bounds", [None, (0.0,), 1.0])
async def test_a_grader_that_does_not_say_its_bounds_is_a_failure(bounds):
    reward = Scripted()
    reward.bounds = bounds
    result = await grade(reward, Response("a"))
    assert (result.status, "expected bounds (low, high)" in result.detail) == (Status.ERROR, True)


def test_waiting_for_a_free_worker_costs_no_time_limit(virtual_clock):
    assert virtual_clock.run(grade(Scripted(), Response("queue"), limit_s=60.0)).reward == 1.0


async def test_no_more_are_graded_at_once_than_asked_for():
    reward = Scripted()
    await grade_all(reward, [Response(str(i)) for i in range(20)], max_concurrent=3)
    assert reward.most_at_once == 3


async def test_a_cancelled_batch_cancels_its_graders():
    reward = Scripted()
    task = asyncio.create_task(grade_all(reward, [Response("hang")] * 3))
    await until(lambda: reward.at_once == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reward.at_once == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_concurrent", 0), ("max_concurrent", 1.5), ("max_concurrent", None), ("limit_s", 0), ("limit_s", math.nan)],
)
async def test_a_wrong_setting_is_reported_and_not_taken_for_a_failed_grader(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        await grade_all(Scripted(), [Response("a")], **{name: value})
