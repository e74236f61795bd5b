"""MathReward: what each outcome is worth, who else is held up by a check, and what a check may compute.

A busy machine is never a timeout, and a hog is never left running.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

import agentenv.rewards.workers.pool as pool
from agentenv.rewards.grading import grade_all
from agentenv.rewards.rules.math.reward import MathGrader, MathReward, default_grader, math_outcome
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import shared_pool
from tests.rewards.workers.worker_processes import READY, REAL, grade_with_fake, state, wait_until, workers

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
async def test_every_outcome_has_its_reward_its_status_and_the_same_components(
    text, outcome, status, extracted, grader
):
    result = await judged(text, 7, grader)
    correct = float(outcome == "correct")
    assert (result.reward, result.score, result.status, result.extracted) == (
        WORTH[outcome], correct, status, extracted
    )  # fmt: skip
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
def test_checks_in_threads_with_their_own_loops_work(grader):
    scores = []

    def work(number: int) -> None:
        scores.append(asyncio.run(judged(rf"\boxed{{|{{-{number + 1}}}|}}", number + 1, grader)).score)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 4


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


@pytest.fixture
def no_worker_is_left():
    before = workers() | workers(module="fake_worker")
    yield
    assert workers() | workers(module="fake_worker") <= before


@pytest.mark.long
@pytest.mark.usefixtures("no_worker_is_left")
async def test_a_worker_that_neither_answers_nor_computes_is_lost_and_never_a_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_MIN_WALL_S", 0.5)
    monkeypatch.setattr(pool, "_WALL_PER_CPU", 0.0)
    grade = await grade_with_fake(READY + "time.sleep(60)", tmp_path, monkeypatch)
    assert math_outcome(grade) == "infra"
    assert "no reply within 0.5 s" in grade.detail
    assert "2 attempts" in grade.detail


@pytest.mark.long
@pytest.mark.usefixtures("no_worker_is_left")
async def test_a_worker_that_computed_its_share_is_a_timeout_at_the_wall_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_MIN_WALL_S", 10.0)  # thirty times what it computes
    monkeypatch.setattr(pool, "_WALL_PER_CPU", 0.0)
    computes = "while time.process_time() < 0.3: pass\ntime.sleep(60)"
    grade = await grade_with_fake(READY + computes, tmp_path, monkeypatch)
    assert math_outcome(grade) == "timeout"


@pytest.mark.long
@pytest.mark.usefixtures("no_worker_is_left")
async def test_waiting_for_a_processor_is_not_computing(tmp_path, monkeypatch):
    before = workers(module="fake_worker")
    stops = REAL.format("os.kill(os.getpid(), signal.SIGSTOP)")
    check = asyncio.create_task(grade_with_fake(stops, tmp_path, monkeypatch, label=2))
    await wait_until(lambda: any(state(pid) == "T" for pid in workers(module="fake_worker") - before))
    await asyncio.sleep(2.0)  # ten times `timeout_s`, in the middle of the check
    for pid in workers(module="fake_worker") - before:
        os.kill(pid, signal.SIGCONT)
    assert math_outcome(await check) == "correct"


@pytest.mark.long
@pytest.mark.usefixtures("no_worker_is_left")
async def test_a_niced_worker_on_a_busy_machine_grades_a_right_answer_correct():
    spin = [sys.executable, "-c", "while True: pass"]
    async with MathGrader(num_workers=1, timeout_s=3.0) as grader:
        await grader.grade(r"\boxed{(x+1)^2}", "x^2+2x+1")  # the first of a kind computes 0.3 s, the next 0.05 s
        crowd = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
        try:
            grades = [await grader.grade(rf"\boxed{{(x+{n})^2}}", f"x^2+{2 * n}x+{n * n}") for n in range(2, 5)]
        finally:
            for process in crowd:
                process.kill()
                process.wait()
    assert {math_outcome(grade) for grade in grades} == {"correct"}
