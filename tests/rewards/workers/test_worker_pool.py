"""Workers that die, hang, lie or cannot start; loops and parents that end; limits, and what a request costs others."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentenv._util.calls import bounded
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.rules.math.reward import math_outcome
from agentenv.rewards.workers import pool as pool_worker
from agentenv.rewards.workers.pool import WorkerFailed, WorkerPool, WorkerTimeout
from tests.rewards.workers.worker_processes import READY, grade_with_fake, workers
from tests.waits import is_alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ROOT = str(Path(__file__).resolve().parents[3])
HANDLERS = str(Path(__file__).with_name("handlers.py"))


@pytest.fixture(autouse=True)
def no_worker_is_left():
    before = workers() | workers(module="fake_worker")
    yield
    assert workers() | workers(module="fake_worker") <= before


@pytest.fixture
async def pool():
    pool = WorkerPool(num_workers=1)
    yield pool
    await pool.close()


async def ask(pool: WorkerPool, name: str, *, cpu_limit_s: float = 20.0, **fields) -> dict:
    return await pool.run({"task": f"{HANDLERS}:{name}", **fields}, cpu_limit_s=cpu_limit_s)


async def echo(pool: WorkerPool, say: object = 1) -> dict:
    return await ask(pool, "echo", say=say)


# --- requests and handlers ------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_request_and_its_result_are_plain_json(pool):
    say = {"text": "é\ud800\0", "numbers": [1, -2.5, None, True], "nested": {"a": []}}
    assert (await echo(pool, say))["said"] == say
    megabytes = "x" * (5 << 20)  # more than a socket takes at once
    assert (await echo(pool, megabytes))["said"] == megabytes


@pytest.mark.long
@pytest.mark.parametrize("say", [object(), {1, 2}, b"bytes", "x" * (9 << 20)])
async def test_input_that_is_not_json_or_too_long_is_the_rows_fault(pool, say):
    with pytest.raises(DataError, match=r"^request: expected .* got .*\."):
        await echo(pool, say)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "error", "word"),
    [
        ("data", DataError, "^of mine$"),
        ("infra", WorkerFailed, "InfraError: of mine"),
        ("value", WorkerFailed, "ValueError: of mine"),
        ("exit", WorkerFailed, "SystemExit: bye"),
        ("memory", WorkerTimeout, "memory"),
    ],
)
async def test_exceptions_of_a_handler_come_back_typed(pool, kind, error, word):
    before = (await echo(pool))["pid"]
    with pytest.raises(error, match=word):
        await ask(pool, "raises", kind=kind)
    assert ((await echo(pool))["pid"] == before) is (kind != "memory")


async def test_a_handler_that_prints_or_reads_disturbs_nothing(pool):
    assert await ask(pool, "prints") == {"read": ""}


@pytest.mark.long
@pytest.mark.parametrize("task", [None, "nothing", "no.such.module:handle", "nowhere.py:handle", f"{HANDLERS}:absent"])
async def test_an_unknown_task_is_a_failure_that_names_it(pool, task):
    with pytest.raises(WorkerFailed, match=rf"cannot load {task}: \w+"):
        await pool.run({"task": task})
    with pytest.raises(WorkerFailed, match=r"cannot load .*ImportError: pip install something"):
        await ask(pool, "broken_to_load", say=1)


@pytest.mark.long
async def test_a_handler_is_loaded_once_by_each_worker_and_sent_where_it_is_loaded():
    pool = WorkerPool(num_workers=2)
    sleeping = asyncio.create_task(ask(pool, "sleep", seconds=0.5))
    await asyncio.sleep(0)  # it takes its worker at once
    first = await echo(pool)
    other = (await sleeping)["pid"]
    for _ in range(3):
        assert (await echo(pool))["pid"] == first["pid"]
        assert (await ask(pool, "sleep", seconds=0))["pid"] == other
    assert (await echo(pool))["prepared"] == [f"{HANDLERS}:echo"]
    await pool.close()


@pytest.mark.parametrize(("name", "value"), [("num_workers", 1.5), ("max_tasks_per_worker", 0)])
def test_wrong_limits_are_refused_at_once(name, value):
    with pytest.raises(ConfigError, match=rf"^WorkerPool\.{name}: expected a whole number in "):
        WorkerPool(**{name: value})


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_each_request_has_its_own_limits(pool, monkeypatch):
    with pytest.raises(WorkerTimeout, match=r"more than 0\.2 s of CPU time"):
        await ask(pool, "spin", cpu_limit_s=0.2)
    with pytest.raises(WorkerTimeout, match=r"more than 0\.5 GiB of memory"):
        await pool.run({"task": f"{HANDLERS}:eat", "bytes": 1 << 30}, cpu_limit_s=20.0, memory_limit_bytes=1 << 29)
    monkeypatch.setattr(pool_worker, "_MIN_WALL_S", 0.3)
    with pytest.raises(WorkerFailed, match=r"no reply within 0\.3 s, .*2 attempts"):
        await ask(pool, "sleep", seconds=60, cpu_limit_s=0.03)
    assert (await echo(pool, "on"))["said"] == "on"


@pytest.mark.long
@pytest.mark.parametrize("name", ["never_polls", "swallows"])
async def test_anything_that_cannot_be_interrupted_is_killed_soon_after_its_share_of_computing(pool, name, monkeypatch):
    monkeypatch.setattr(pool_worker, "_MIN_WALL_S", 1000.0)
    before = (await echo(pool))["pid"]
    with pytest.raises(WorkerTimeout, match=r"more than 0\.2 s of CPU time"):
        await ask(pool, name, cpu_limit_s=0.2)
    assert (await echo(pool))["pid"] != before


@pytest.mark.long
async def test_loading_a_handler_is_not_the_requests_computing(pool):
    assert (await ask(pool, "slow_to_load", say="late", cpu_limit_s=0.2))["said"] == "late"  # a second of it


@pytest.mark.long
async def test_what_a_worker_computed_before_is_not_the_requests_computing(pool, monkeypatch):
    monkeypatch.setattr(pool_worker, "_CPU_GRACE_S", 0.1)
    before = (await ask(pool, "spin", until_cpu_s=1.0))["pid"]
    assert (await ask(pool, "sleep", seconds=1.0, cpu_limit_s=0.2))["pid"] == before


@pytest.mark.long
async def test_the_deadline_of_the_caller_stands_still_in_the_queue(pool):
    await echo(pool)

    async def one() -> dict:
        return await ask(pool, "sleep", seconds=0.15)

    assert len(await asyncio.gather(*(bounded(one, limit_s=2.0) for _ in range(14)))) == 14


@pytest.mark.long
async def test_a_worker_that_grew_too_large_is_replaced(pool):
    ours = b"x" * (600 << 20)  # what the parent holds is not the worker's
    before = (await echo(pool))["pid"]
    assert (await ask(pool, "eat", bytes=600 << 20))["pid"] == before
    assert (await ask(pool, "sleep", seconds=0))["pid"] == before
    assert (await ask(pool, "eat", bytes=600 << 20, keep=True))["pid"] == before
    assert (await ask(pool, "sleep", seconds=0))["pid"] != before
    del ours


# --- lives and deaths -----------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_close_is_idempotent_leaves_no_child_and_a_later_check_starts_again():
    pool, before = WorkerPool(num_workers=1), workers()
    for _ in range(2):
        await echo(pool)
        assert len(workers() - before) == 1
        await pool.close()
        await pool.close()
        assert workers() <= before


@pytest.mark.long
async def test_a_check_in_flight_at_close_is_a_failure_not_a_wrong_answer():
    pool = WorkerPool(num_workers=1)
    await echo(pool)
    checks = [asyncio.create_task(ask(pool, "sleep", seconds=60)) for _ in range(2)]
    await asyncio.sleep(0.3)
    await pool.close()
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert {type(result) for result in results} == {WorkerFailed}


@pytest.mark.long
async def test_a_worker_killed_once_in_a_check_is_replaced_and_the_check_repeated(pool, tmp_path):
    check = asyncio.create_task(ask(pool, "dies", flag=str(tmp_path / "flag")))
    queued = asyncio.create_task(echo(pool, "next"))
    assert (await check)["pid"]
    assert (await queued)["said"] == "next"


@pytest.mark.long
@pytest.mark.parametrize("segfault", [True, False])
async def test_a_worker_killed_twice_in_a_check_is_a_failure_and_others_continue(pool, segfault):
    check = asyncio.create_task(ask(pool, "dies", segfault=segfault))
    queued = asyncio.create_task(echo(pool, "next"))
    with pytest.raises(WorkerFailed, match=r"a worker died during the check \(2 attempts\)"):
        await check
    assert (await queued)["said"] == "next"


@pytest.mark.long
async def test_an_idle_worker_that_died_is_replaced_unnoticed(pool):
    pid = (await echo(pool))["pid"]
    os.kill(pid, signal.SIGKILL)
    assert (await echo(pool))["pid"] != pid


@pytest.mark.long
async def test_cancelling_at_any_moment_leaves_a_pool_that_works():
    pool, before, rng = WorkerPool(num_workers=2), workers(), random.Random(0)
    for _ in range(12):
        checks = [asyncio.create_task(echo(pool, n)) for n in range(10)]
        await asyncio.sleep(rng.choice([0, 0.0005, 0.001, 0.01, 0.1, 0.2]))
        for check in (cancelled := rng.sample(checks, 6)):
            check.cancel()
        results = await asyncio.gather(*checks, return_exceptions=True)
        for number, (check, result) in enumerate(zip(checks, results, strict=True)):
            answered = isinstance(result, dict) and result["said"] == number
            assert answered or (check in cancelled and isinstance(result, asyncio.CancelledError)), result
    assert len(workers() - before) <= 2
    await pool.close()


@pytest.mark.long
async def test_a_worker_is_replaced_after_its_share_of_tasks():
    pool = WorkerPool(num_workers=1, max_tasks_per_worker=2)
    pids = [(await echo(pool))["pid"] for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    await pool.close()


@pytest.mark.long
def test_a_loop_that_ends_during_a_check_takes_the_worker_with_it():
    pool = WorkerPool(num_workers=1)

    async def leave() -> None:
        leave.task = asyncio.create_task(ask(pool, "sleep", seconds=60))  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)

    asyncio.run(leave())
    assert asyncio.run(echo(pool, "next"))["said"] == "next"
    asyncio.run(pool.close())


@pytest.mark.long
def test_loops_of_several_threads_share_a_pool():
    pool = WorkerPool(num_workers=1)

    async def in_threads() -> list[int]:
        def run(number: int) -> int:
            return [asyncio.run(echo(pool, number))["said"] for _ in range(10)].pop()

        return await asyncio.gather(*(asyncio.to_thread(run, number) for number in range(4)))

    assert asyncio.run(in_threads()) == [0, 1, 2, 3]
    pool.close_now()


@pytest.mark.long
@pytest.mark.parametrize(
    ("behavior", "detail"),
    [
        ("raise SystemExit('no math-verify here')", "no math-verify here"),
        (READY + "raise SystemExit(1)", "died"),
        (READY + "send(b'not json')", "garbage"),
        (READY + "send({'id': request['id'], 'status': 'ok', 'result': []})", "garbage"),
        (READY + "result(status='perhaps', correct=True, detail='')", "garbage"),
        (READY + "os.write(1, b'\\xff' * 100); time.sleep(60)", "garbage"),
    ],
)
async def test_a_broken_worker_is_a_failure_and_never_a_wrong_answer(behavior, detail, tmp_path, monkeypatch):
    grade = await grade_with_fake(behavior, tmp_path, monkeypatch)
    assert math_outcome(grade) == "infra"
    assert detail in grade.detail


async def test_a_missing_interpreter_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(WorkerFailed, match="cannot start"):
        await echo(WorkerPool(num_workers=1))


# --- the process's end, and forks -----------------------------------------------------------------------------------


def script(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    head = f"import asyncio, os\nfrom agentenv.rewards.workers.pool import shared_pool\nTASK = {HANDLERS + ':'!r}\n"
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", head + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.long
async def test_workers_end_with_a_parent_that_is_killed():
    parent = script(
        """
        async def main():
            check = asyncio.create_task(shared_pool().run({"task": TASK + "spin"}, cpu_limit_s=60))
            print((await shared_pool().run({"task": TASK + "echo", "say": "ready"}))["said"], flush=True)
            await check
        asyncio.run(main())
        """
    )
    assert parent.stdout is not None
    assert await asyncio.to_thread(parent.stdout.readline) == "ready\n"
    pids = workers(parent.pid)
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    await until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.long
async def test_the_shared_pool_ends_with_the_process_without_a_warning():
    process = script(
        """
        print(asyncio.run(shared_pool().run({"task": TASK + "echo", "say": "done"}))["said"])
        """
    )
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("done\n", "", 0)
    assert not workers(process.pid)


@pytest.mark.long
async def test_a_forked_child_starts_its_own_workers_and_spares_the_parents():
    process = script(
        """
        def pid(): return asyncio.run(shared_pool().run({"task": TASK + "echo", "say": ""}))["pid"]
        before = pid()
        child = os.fork()
        print(pid() == before, flush=True)
        if child:
            assert os.waitpid(child, 0)[1] == 0
            print(pid() == before)
        """
    )
    out, err = process.communicate(timeout=60)
    told = [line for line in err.splitlines() if not line.startswith("Executing ")]  # asyncio's, of a busy machine
    assert (sorted(out.split()), told, process.returncode) == (["False", "True", "True"], [], 0)
