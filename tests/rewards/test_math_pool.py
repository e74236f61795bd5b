"""Workers that die, hang, lie or cannot start; loops and parents that end: a grader failure is never a wrong answer."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agentenv.rewards.math import Grade, MathGrader, Outcome
from tests.rewards.workers import ANSWER, READY, alive, grade_with_fake, once, wait_until, workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ENDLESS = r"\boxed{9^{9^{9^9}}}"
ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(autouse=True)
def no_worker_is_left():
    before = workers() | workers(module="fake_worker")
    yield
    assert workers() | workers(module="fake_worker") <= before


async def test_close_is_idempotent_leaves_no_child_and_a_later_check_starts_anew():
    grader = MathGrader()
    before = workers()
    await grader.close()
    assert (await grader.grade(r"\boxed{1+1}", 2)).outcome is Outcome.CORRECT
    assert len(workers() - before) == 1
    await grader.close()
    await grader.close()
    assert workers() <= before
    assert (await grader.grade(r"\boxed{1+2}", 3)).outcome is Outcome.CORRECT
    await grader.close()


async def test_workers_start_only_when_an_answer_needs_one():
    before = workers()
    async with MathGrader() as grader:
        await grader.grade(r"\boxed{2}", 2)
        await grader.grade("no answer", 2)
        assert workers() == before


async def test_a_check_in_flight_at_close_is_a_failure_not_a_wrong_answer():
    before = workers()
    grader = MathGrader(num_workers=1)
    checks = [asyncio.create_task(grader.grade(text, 5)) for text in (ENDLESS, r"\boxed{4+2}")]
    await wait_until(lambda: workers() - before)
    await asyncio.sleep(0.8)
    await grader.close()
    assert {grade.outcome for grade in await asyncio.gather(*checks)} == {Outcome.INFRA}


async def test_a_worker_killed_once_in_a_check_is_replaced_and_the_check_repeated():
    before = workers()
    async with MathGrader(num_workers=1, timeout_s=1.0) as grader:
        await grader.grade(r"\boxed{1+1}", 2)
        check = asyncio.create_task(grader.grade(ENDLESS, 5))
        queued = asyncio.create_task(grader.grade(r"\boxed{2+2}", 4))
        await asyncio.sleep(0.2)
        for pid in workers() - before:
            os.kill(pid, signal.SIGKILL)
        assert (await check).outcome is Outcome.TIMEOUT  # by the second worker
        assert (await queued).outcome is Outcome.CORRECT


async def test_a_worker_killed_twice_in_a_check_is_a_failure_and_others_go_on():
    before = workers()
    async with MathGrader(num_workers=1, timeout_s=5.0) as grader:
        check = asyncio.create_task(grader.grade(ENDLESS, 5))
        queued = asyncio.create_task(grader.grade(r"\boxed{2+2}", 4))
        killed: set[int] = set()
        while not check.done():
            for pid in workers() - before - killed:
                await asyncio.sleep(0.7)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            if len(killed) == 2:
                break
            await asyncio.sleep(0.01)
        grade = await check
        assert grade.outcome is Outcome.INFRA
        assert "2 attempts" in grade.detail
        assert (await queued).outcome is Outcome.CORRECT


async def test_an_idle_worker_that_died_is_replaced_unnoticed():
    before = workers()
    async with MathGrader() as grader:
        await grader.grade(r"\boxed{1+1}", 2)
        for pid in workers() - before:
            os.kill(pid, signal.SIGKILL)
        assert (await grader.grade(r"\boxed{1+2}", 3)).outcome is Outcome.CORRECT


async def test_cancelling_frees_the_worker_slot():
    before = workers()
    async with MathGrader(num_workers=1, timeout_s=30.0) as grader:
        check = asyncio.create_task(grader.grade(ENDLESS, 5))
        await wait_until(lambda: workers() - before)
        await asyncio.sleep(0.8)
        check.cancel()
        with pytest.raises(asyncio.CancelledError):
            await check
        await wait_until(lambda: not workers() - before)
        assert (await asyncio.wait_for(grader.grade(r"\boxed{1+1}", 2), 10)).outcome is Outcome.CORRECT


async def test_cancelling_at_any_moment_leaves_a_grader_that_works():
    before, rng = workers(), random.Random(0)
    async with MathGrader(num_workers=2) as grader:
        for _ in range(12):
            checks = [asyncio.create_task(grader.grade(rf"\boxed{{{n % 5}+1}}", 7)) for n in range(10)]
            await asyncio.sleep(rng.choice([0, 0.001, 0.01, 0.1, 0.6]))
            for check in rng.sample(checks, 6):
                check.cancel()
            kept = [
                grade for grade in await asyncio.gather(*checks, return_exceptions=True) if isinstance(grade, Grade)
            ]
            assert {grade.outcome for grade in kept} <= {Outcome.WRONG}
            grader._cache.clear()
        assert len(workers() - before) <= 2


async def test_a_reply_that_came_while_the_loop_was_blocked_counts():
    async with MathGrader(num_workers=1, timeout_s=0.2) as grader:
        await grader.grade(r"\boxed{1+1}", 2)
        check = asyncio.create_task(grader.grade(r"\boxed{1+2}", 3))
        await asyncio.sleep(0)
        time.sleep(1.5)  # past the deadline
        assert (await check).outcome is Outcome.CORRECT


async def test_a_worker_is_replaced_after_its_share_of_tasks():
    before = workers()
    async with MathGrader(num_workers=1, max_tasks_per_worker=2) as grader:
        seen = set()
        for number in range(4):
            await grader.grade(rf"\boxed{{{number}+1}}", number + 1)
            seen |= workers() - before
        assert len(seen) == 2


async def test_more_checks_than_max_pending_wait_in_line():
    async with MathGrader(num_workers=1, max_pending=1) as grader:
        grades = await asyncio.gather(*(grader.grade(rf"\boxed{{{n}+1}}", n + 1) for n in range(20)))
        assert {grade.outcome for grade in grades} == {Outcome.CORRECT}


def test_one_grader_serves_event_loops_one_after_another_with_the_same_worker():
    grader = MathGrader(num_workers=1)
    seen = []
    for number in range(3):
        assert asyncio.run(grader.grade(rf"\boxed{{{number}+1}}", number + 1)).outcome is Outcome.CORRECT
        seen.append(workers())
    asyncio.run(grader.close())
    assert seen[0] == seen[1] == seen[2]


def test_a_loop_that_ends_during_a_check_takes_the_worker_with_it():
    grader = MathGrader(num_workers=1, timeout_s=30.0)

    async def leave() -> None:
        leave.task = asyncio.create_task(grader.grade(ENDLESS, 5))  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)

    asyncio.run(leave())
    assert asyncio.run(grader.grade(r"\boxed{1+1}", 2)).outcome is Outcome.CORRECT
    asyncio.run(grader.close())


def test_loops_of_several_threads_share_a_grader():
    grader = MathGrader(num_workers=1)

    async def in_threads() -> list[Outcome]:
        def run(number: int) -> Outcome:
            return asyncio.run(grader.grade(rf"\boxed{{{number}+1}}", number + 1)).outcome

        return await asyncio.gather(*(asyncio.to_thread(run, number) for number in range(3)))

    assert set(asyncio.run(in_threads())) == {Outcome.CORRECT}
    grader.close_now()


@pytest.mark.parametrize(
    ("behaviour", "detail"),
    [
        ("raise SystemExit('no math-verify here')", "no math-verify here"),
        ("raise ImportError('pip install math-verify')", "pip install math-verify"),
        ("print('hello ' * 100)", "garbage"),
        (READY + "raise SystemExit(1)", "died"),
        (READY + "os.kill(os.getpid(), 11)", "died"),
        (READY + "send(b'not json')", "garbage"),
        (READY + "send([1])", "garbage"),
        (READY + "send({})", "out of turn"),
        (READY + "send({'id': 99, 'outcome': 'wrong', 'detail': ''})", "out of turn"),
        (READY + "send({'id': request['id'], 'outcome': 'perhaps', 'detail': ''})", "garbage"),
        (READY + "send({'id': request['id']})", "garbage"),
        (READY + "os.write(1, b'\\xff' * 100); time.sleep(60)", "garbage"),
        (READY + "os.write(1, b'\\x00\\x00'); raise SystemExit", "garbage"),
    ],
)
async def test_a_broken_worker_is_a_failure_and_never_a_wrong_answer(behaviour, detail, tmp_path, monkeypatch):
    grade = await grade_with_fake(behaviour, tmp_path, monkeypatch)
    assert grade.outcome is Outcome.INFRA
    assert detail in grade.detail


async def test_a_worker_that_fails_once_is_tried_again(tmp_path, monkeypatch):
    grade = await grade_with_fake(READY + once(tmp_path, "raise SystemExit") + ANSWER, tmp_path, monkeypatch)
    assert grade.outcome is Outcome.CORRECT


async def test_a_missing_interpreter_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    grade = await MathGrader().grade(r"\boxed{1+1}", 3)
    assert grade.outcome is Outcome.INFRA
    assert "cannot start" in grade.detail


def script(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


async def test_workers_end_with_a_parent_that_is_killed():
    parent = script(
        r"""
        import asyncio
        from agentenv.rewards.math import MathGrader
        async def main():
            grader = MathGrader(timeout_s=60)
            check = asyncio.create_task(grader.grade(r"\boxed{9^{9^{9^9}}}", 5))
            print((await grader.grade(r"\boxed{1+1}", 2)).outcome, flush=True)
            await check
        asyncio.run(main())
        """
    )
    assert parent.stdout is not None
    assert await asyncio.to_thread(parent.stdout.readline) == "correct\n"
    pids = workers(parent.pid)
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    await wait_until(lambda: not any(alive(pid) for pid in pids), 5.0)


async def test_the_default_grader_ends_with_the_process_without_a_warning():
    process = script(
        r"""
        import asyncio
        from agentenv.rewards.math import default_grader
        assert default_grader() is default_grader()
        print(asyncio.run(default_grader().grade(r"\boxed{1+1}", 2)).outcome)
        """
    )
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("correct\n", "", 0)
    assert not workers(process.pid)


async def test_a_forked_child_starts_its_own_workers_and_spares_the_parents():
    process = script(
        r"""
        import asyncio, os
        from agentenv.rewards.math import default_grader
        def grade(n): return asyncio.run(default_grader().grade(rf"\boxed{{{n}+1}}", n + 1)).outcome
        print(grade(1), flush=True)
        pid = default_grader()._pool._idle[0].process.pid
        child = os.fork()
        print(grade(2), flush=True)
        if child:
            assert os.waitpid(child, 0)[1] == 0
            print(grade(3), default_grader()._pool._idle[0].process.pid == pid)
        """
    )
    out, err = process.communicate(timeout=60)
    assert (out.split(), err, process.returncode) == (["correct"] * 4 + ["True"], "", 0)
