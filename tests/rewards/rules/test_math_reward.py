"""MathReward: what each outcome is worth, who else is held up by a check, and what a check may compute.

A busy machine is never a timeout, and a hog is never left running.
"""

import asyncio
import signal

import pytest

import agentenv.rewards.workers.pool as pool
from agentenv.rewards.grading import grade_all
from agentenv.rewards.rules.math.reward import MathGrader, MathReward, default_grader, math_outcome
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import shared_pool
from tests.rewards.workers.worker_processes import READY, grade_with_fake

ENDLESS = "9^{9^{9^9}}"
WORTH = {"correct": 2.0, "wrong": -0.1, "no_answer": -0.2, "parse_error": -0.3, "timeout": -0.4}


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout_s=1.5)  # a right answer computes 0.3 s at first
    yield grader
    asyncio.run(grader.close())


async def judged(text: str, label: object, grader: MathGrader) -> RewardResult:
    return await MathReward(grader=grader, **WORTH).grade(Response(text, label))


# --- what a reward says ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "outcome", "status", "extracted"),
    [
        (r"\boxed{7}", "correct", Status.OK, "7"),
        (r"\boxed{8}", "wrong", Status.OK, "8"),
        ("seven", "no_answer", Status.NO_ANSWER, None),
        (r"\boxed{1 2 3}", "parse_error", Status.PARSE_ERROR, "1 2 3"),
        (rf"\boxed{{{ENDLESS}}}", "timeout", Status.TIMEOUT, ENDLESS),
    ],
)
async def test_every_outcome_has_its_reward_its_status_and_components(text, outcome, status, extracted, grader):
    result = await judged(text, 7, grader)
    correct = float(outcome == "correct")
    assert (result.reward, result.score) == (WORTH[outcome], correct)
    assert (result.status, result.extracted) == (status, extracted)
    assert result.components == {"correct": correct, "has_answer": float(extracted is not None)}
    assert result.feedback
    assert "7" not in result.feedback


async def test_a_failed_grader_is_not_a_wrong_answer(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    result = await MathReward(grader=MathGrader(num_workers=1)).grade(Response(r"\boxed{\sqrt{49}}", 7))
    assert (result.reward, result.score, result.status) == (None, None, Status.INFRA)
    assert "cannot start" in result.detail


@pytest.mark.long
async def test_the_default_grader_works_in_the_shared_pool_and_never_closes_it():
    await default_grader().grade(r"\boxed{\sqrt{4}}", 2)
    idle = [worker.process.pid for worker in shared_pool()._idle]
    assert idle
    await default_grader().close()
    assert [worker.process.pid for worker in shared_pool()._idle if worker.process.poll() is None] == idle


async def test_an_alarm_of_the_caller_survives_a_check(grader):
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        assert (await judged(r"\boxed{\sqrt{49}}", 7, grader)).score == 1.0
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.long
async def test_an_answer_that_would_freeze_the_interpreter_costs_the_batch_its_own_place_only():
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0.01)
            num_ticks += 1

    async with MathGrader(num_workers=2, timeout_s=1.5) as grader:
        await judged(r"\boxed{\sqrt{4}}", 2, grader)
        ticking = asyncio.create_task(tick())
        texts = [rf"\boxed{{{ENDLESS}}}", *(rf"\boxed{{|{{-{number}}}|}}" for number in range(4, 34))]
        labels = [5, *(number + 4 for number in range(30))]
        batch = [Response(text, label) for text, label in zip(texts, labels, strict=True)]
        results = await grade_all(MathReward(grader=grader), batch)
        ticking.cancel()
    assert [result.status for result in results] == [Status.TIMEOUT, *[Status.OK] * 30]
    assert {result.score for result in results[1:]} == {1.0}
    assert num_ticks >= 5, "a frozen interpreter ticks once"


# --- what a check may compute -----------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_worker_that_computed_its_share_is_a_timeout_at_the_wall_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_MIN_WALL_S", 10.0)  # thirty times what it computes
    monkeypatch.setattr(pool, "_WALL_PER_CPU", 0.0)
    computes = "while time.process_time() < 0.3: pass\ntime.sleep(60)"
    grade = await grade_with_fake(READY + computes, tmp_path, monkeypatch)
    assert math_outcome(grade) == "timeout"
