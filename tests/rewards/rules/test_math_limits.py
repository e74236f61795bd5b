"""What a check may compute and how long it may take: a busy machine is never a timeout, a hog is never left running."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

import agentenv.rewards.workers.pool as pool
from agentenv.rewards.rules.math.reward import MathGrader, math_outcome
from tests.rewards.workers.worker_processes import (
    READY,
    REAL,
    grade_with_fake,
    state,
    wait_until,
    workers,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(autouse=True)
def no_worker_is_left():
    before = workers() | workers(module="fake_worker")
    yield
    assert workers() | workers(module="fake_worker") <= before


@pytest.mark.long
async def test_a_worker_that_neither_answers_nor_computes_is_lost_and_never_a_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_MIN_WALL_S", 0.5)
    monkeypatch.setattr(pool, "_WALL_PER_CPU", 0.0)
    grade = await grade_with_fake(READY + "time.sleep(60)", tmp_path, monkeypatch)
    assert math_outcome(grade) == "infra"
    assert "no reply within 0.5 s" in grade.detail
    assert "2 attempts" in grade.detail


@pytest.mark.long
async def test_a_worker_that_computed_its_share_is_a_timeout_at_the_wall_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_MIN_WALL_S", 10.0)  # thirty times what it computes
    monkeypatch.setattr(pool, "_WALL_PER_CPU", 0.0)
    computes = "while time.process_time() < 0.3: pass\ntime.sleep(60)"
    grade = await grade_with_fake(READY + computes, tmp_path, monkeypatch)
    assert math_outcome(grade) == "timeout"


@pytest.mark.long
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
