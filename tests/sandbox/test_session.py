"""What stays from turn to turn, what a turn gives, and how a session ends."""

import asyncio

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox import ExecLimits, ExecStatus, LocalSandbox, SandboxBusy
from tests.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUICK = ExecLimits(cpu_s=60, wall_s=3.0)  # time for a busy machine to take the short turns


@pytest.mark.long
async def test_definitions_and_files_of_a_turn_persist_in_the_next(sandbox):
    async with sandbox.session() as session:
        first = await session.run("import json\nx = 6\ndef f(): return x * 7\nopen('a', 'w').write('b')\nprint('one')")
        assert (first.status, first.stdout, first.value) == (ExecStatus.OK, "one\n", None)
        second = await session.run("print(open('a').read(), json.dumps([x]))\nf()")
        assert (second.status, second.stdout, second.value) == (ExecStatus.OK, "b [6]\n", "42")
        assert (await session.run("_ + 1")).value == "43"
        assert second.isolation is sandbox.isolation


async def test_an_error_is_reported_by_the_codes_own_frames_and_the_session_continues(sandbox):
    async with sandbox.session() as session:
        await session.run("def f(x):\n    return 1 / x")
        turn = await session.run("print('before')\nf(0)")
        assert (turn.status, turn.stdout, turn.ended) == (ExecStatus.NONZERO, "before\n", False)
        assert turn.traceback.splitlines()[:4] == [
            "Traceback (most recent call last):", '  File "turn-2.py", line 2, in <module>', "    f(0)",
            '  File "turn-1.py", line 2, in f',
        ]  # fmt: skip
        assert turn.traceback.endswith("ZeroDivisionError: division by zero\n")
        assert "SyntaxError" in (await session.run("def (")).traceback
        assert (await session.run("1 + 1")).value == "2"


async def test_each_turn_has_its_own_output(sandbox):
    async with sandbox.session() as session:
        big = await session.run("import sys\nprint('x' * 200_000)\nsys.stderr.write('e')\nNone")
        assert (len(big.stdout), big.stdout_truncated, big.stderr) == (65536, True, "e")
        small = await session.run("print('y')")
        assert (small.stdout, small.stdout_truncated, small.stderr) == ("y\n", False, "")


@pytest.mark.long
@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "while True: pass"])
async def test_a_turn_that_takes_too_long_is_interrupted_and_the_state_stays(sandbox, code, monkeypatch):
    monkeypatch.setattr("agentenv.sandbox.local.session.GRACE_S", 60.0)  # a busy machine interrupts it late
    async with sandbox.session(limits=QUICK) as session:
        await session.run("x = 1")
        turn = await session.run(f"try:\n {code.replace(chr(10), chr(10) + ' ')}\nexcept Exception: pass")
        assert (turn.status, turn.ended) == (ExecStatus.WALL_TIMEOUT, False)
        assert (await session.run("x")).value == "1"


@pytest.mark.long
async def test_a_turn_that_cannot_be_interrupted_ends_the_session(sandbox):
    async with sandbox.session(limits=QUICK) as session:
        turn = await session.run("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(60)")
        assert (turn.status, turn.ended) == (ExecStatus.WALL_TIMEOUT, True)
        again = await session.run("1")
        assert (again.status, again.ended) == (ExecStatus.WALL_TIMEOUT, True)


async def test_memory_runs_out_without_ending_the_session(sandbox):
    limits = ExecLimits(memory_mb=64, wall_s=60.0)  # a busy machine took longer than the usual limit once
    async with sandbox.session(limits=limits) as session:
        assert (await session.run("x = bytearray(1 << 30)")).status is ExecStatus.MEMORY
        assert (await session.run("1 + 1")).value == "2"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; os.close(3)",
        "import os; os.write(3, b'\\xff' * 100)",
        "import os; os.write(3, b'[]\\n')",
        "import os; os.write(3, b'\\n')",
        "import os; os.write(3, b'1' * (3 << 19))",
    ],
)
async def test_code_that_breaks_the_session_ends_it_and_nothing_else(sandbox, code):
    async with sandbox.session() as session:
        turn = await session.run(f"print('said', flush=True)\n{code}")
        assert turn.status in (ExecStatus.NONZERO, ExecStatus.WALL_TIMEOUT)
        assert turn.ended
        assert turn.stdout == "said\n"
    assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_leaving_is_reported_by_its_code(sandbox):
    async with sandbox.session() as session:
        assert (await session.run("raise SystemExit")).status is ExecStatus.OK
        assert (await session.run("import sys; sys.exit(2)")).status is ExecStatus.NONZERO
        assert (await session.run("1")).value == "1"


async def test_values_and_tracebacks_are_safe_to_show(sandbox):
    async with sandbox.session() as session:
        assert (await session.run("chr(0) + '\\x1b[2J'")).value == "'\\x00\\x1b[2J'"
        turn = await session.run("class A:\n def __repr__(self): return '\\x1b]0;' + '\\ud800' + 'x' * 10**6\nA()")
        assert turn.status is ExecStatus.OK
        assert "\x1b" not in turn.value
        assert len(turn.value) < 10_000
        forged = b'{"limit": [[[]]], "exit": {}, "traceback": "\\u001b", "value": [1]}\n'
        turn = await session.run(f"import os; os.write(3, {forged!r})")
        assert (turn.status, turn.value, turn.traceback) == (ExecStatus.NONZERO, None, None)


@pytest.mark.long
async def test_an_idle_session_ends_by_itself(sandbox):
    async with sandbox.session(idle_s=0.1) as session:
        await session.run("x = 1")
        await until(session._execution.ended.done)
        turn = await session.run("x")
        assert (turn.ended, turn.detail) == (True, "session: ended after 0.1 s without a turn")


@pytest.mark.long
async def test_cancelling_a_turn_ends_the_session(sandbox):
    async with sandbox.session() as session:
        task = asyncio.create_task(session.run("import time; time.sleep(60)"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await session.run("1")).ended


async def test_a_session_is_opened_first(sandbox):
    with pytest.raises(ConfigError, match="async with"):
        await sandbox.session().run("1")


@pytest.mark.long
async def test_a_session_whose_turn_got_no_slot_ends_when_it_is_idle_all_the_same():
    async with LocalSandbox(run_slots=1, max_waiting=0) as sandbox:
        long = asyncio.create_task(sandbox.run("import time; time.sleep(100)", limits=ExecLimits(wall_s=120)))
        await until(lambda: sandbox._pool.zygotes[0].in_flight)
        async with sandbox.session(idle_s=0.3) as session:
            with pytest.raises(SandboxBusy):
                await session.run("1")
            await until(lambda: session._over)
            assert "without a turn" in (await session.run("1")).detail
        long.cancel()
