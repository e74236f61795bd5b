"""A grade: no number where the sandbox failed, and nothing of hidden tests in what a model is told."""

import asyncio
import math
from contextvars import ContextVar
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv._util import calls
from agentenv.sandbox.grading import (
    AssertSuite,
    AssertTest,
    FunctionSuite,
    FunctionTest,
    GradeResult,
    Integrity,
    PytestSuite,
    StdioSuite,
    StdioTest,
    TestResult,
    Verdict,
    feedback,
    grade,
)
from agentenv.sandbox.grading.executions import GradingRun
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, SandboxBusy
from tests.sandbox.grading.conftest import Wrapped

ours = pytest.mark.asyncio(loop_scope="module")
LIMITS = ExecLimits(cpu_s=4.0, wall_s=60.0)
SUITES = {
    "stdio": StdioSuite(visible=(StdioTest("1", "1"),), hidden=(StdioTest("2", "SECRET"),)),
    "functions": FunctionSuite("f", visible=(FunctionTest((1,), 1),), hidden=(FunctionTest(("SECRET",), "SECRET"),)),
    "asserts": AssertSuite(("f",), visible=(AssertTest("assert f(1)"),), hidden=(AssertTest("f('SECRET')"),)),
    "pytest": PytestSuite(
        {"test.py": b"import solution\ndef test_a(): pass\ndef test_b(): assert 'SECRET' == 1\n"},
        visible=("test.py::test_a",), hidden=("test.py::test_b",),
    ),
}  # fmt: skip


FAILED = ExecResult(ExecStatus.INFRA, isolation=Isolation.NONE, detail="no more forks")


class Ended:
    """An execution that the sandbox has lost."""

    async def send(self, data): ...

    async def receive(self, max_bytes=0):
        return b""

    async def finish(self):
        return FAILED

    kill = finish


class Failing(Wrapped):
    """A sandbox that fails from its nth execution on, in one of two ways."""

    def __init__(self, inner, after, busy):
        super().__init__(inner)
        self.left = after
        self.busy = busy

    def failed(self):
        """Whether this execution fails."""
        self.left -= 1
        if self.left < 0 and self.busy:
            raise SandboxBusy("sandbox: expected room in the queue, got 10000 that wait.")
        return self.left < 0

    async def run(self, program, **options):
        return FAILED if self.failed() else await super().run(program, **options)

    async def start(self, program, **options):
        return Ended() if self.failed() else await super().start(program, **options)


@ours
@pytest.mark.long
@pytest.mark.parametrize(
    ("after", "busy", "stop_on_fail"), [(0, False, False), (0, True, True), (1, False, True), (1, True, False)]
)
@pytest.mark.parametrize("kind", SUITES)
async def test_a_sandbox_that_fails_yields_no_number(sandbox_with_pytest, kind, after, busy, stop_on_fail):
    code = "def f(x): return x\nif __name__ == '__main__': print(input())\n"
    failing = Failing(sandbox_with_pytest, after, busy)
    result = await grade(failing, code, SUITES[kind], limits=LIMITS, stop_on_fail=stop_on_fail)
    assert (result.sandbox_failed, result.score, result.all_passed) == (True, None, None)
    assert result.share(visible=True) is result.share(visible=False) is None
    assert result.infra_detail
    assert feedback(result) == "The tests could not be run. This says nothing about the program."


class Broken(Wrapped):
    """A sandbox in which the grader's own part of a program does not come to run."""

    async def run(self, program, **options):
        return await super().run("import sys\nsys.exit('no such library')\n", **options)

    async def start(self, program, **options):
        return await super().start("import sys\nsys.exit('no such library')\n", **options)


@ours
@pytest.mark.parametrize("kind", [kind for kind in SUITES if kind != "stdio"])
async def test_a_grader_that_does_not_come_to_run_says_nothing_of_the_program(sandbox_with_pytest, kind):
    result = await grade(Broken(sandbox_with_pytest), "def f(x): return x\n", SUITES[kind], limits=LIMITS)
    assert (result.sandbox_failed, result.score) == (True, None)
    assert "no such library" in result.infra_detail


@ours
@pytest.mark.parametrize("kind", SUITES)
async def test_cancelling_leaves_no_process(sandbox_with_pytest, kind):
    def in_flight():
        return sum(zygote.in_flight for zygote in sandbox_with_pytest._pool.zygotes)

    code = "import time\ntime.sleep(600)\n"
    task = asyncio.create_task(grade(sandbox_with_pytest, code, SUITES[kind], limits=LIMITS))
    async with asyncio.timeout(60):
        while not in_flight():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert in_flight() == 0


@ours
@pytest.mark.parametrize(
    "suite",
    [
        StdioSuite(hidden=(StdioTest("1", "1"),) * 6),
        FunctionSuite("f", visible=(FunctionTest((1,), 1),) * 3, hidden=(FunctionTest((1,), 1),) * 3, batch=1),
    ],
    ids=["stdio", "functions"],
)
async def test_programs_of_one_answer_do_not_wait_for_each_others_run_slots(sandbox, suite):
    class Counting(Wrapped):
        running, most = 0, 0

        async def run(self, program, **options):
            self.running += 1
            self.most = max(self.most, self.running)
            result = await super().run(program, **options)
            self.running -= 1
            return result

    counting = Counting(sandbox)
    counting.run_slots = 2
    await grade(counting, "def f(x): return x\nif __name__ == '__main__': print(input())\n", suite, limits=LIMITS)
    assert counting.most == 2


class Clock:
    """The time limit of the running method, which only tests move."""

    left_s = more_s = math.inf

    def give_back(self, seconds):
        more_s = min(seconds, self.more_s)
        self.left_s, self.more_s = self.left_s + more_s, self.more_s - more_s


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(calls, "_CLOCK", ContextVar("clock", default=(clock := Clock())))
    return clock


@ours
@pytest.mark.parametrize(("delay_s", "num_passed"), [(0.0, 3), (8.0, 5), (13.0, 5)])
async def test_tests_after_the_time_for_all_are_timeouts_unless_the_host_took_it(clock, sandbox, delay_s, num_passed):
    clock.left_s = 44.0

    class Slow(Wrapped):
        async def run(self, program, **options):
            clock.left_s -= 14.0
            return replace(await super().run(program, **options), wall_s=14.0, run_delay_s=delay_s)

    tests = StdioSuite(hidden=(StdioTest("1", "1"),) * 5)
    slow = Slow(sandbox)
    slow.run_slots = 1
    result = await grade(slow, "print(input())", tests, limits=LIMITS)
    late = [Verdict.TIMEOUT] * (5 - num_passed)
    assert [test.verdict for test in result.tests] == [Verdict.PASSED] * num_passed + late


@pytest.mark.parametrize(
    ("executions", "given_back_s"),
    [
        ([(40.0, 0.0)], 0.0),
        ([(40.0, 36.0)], 36.0),
        ([(40.0, 18.0), (0.0, 18.0)], 36.0),  # a pair, whose time counts once
        ([(10.0, 9.0)] * 16, 36.0),  # four at a time
        ([(10.0, 0.0)] * 16, 0.0),
        ([(5.0, 0.0)], 35.0),  # the rest was spent waiting for a slot
        ([], 40.0),
    ],
)
@pytest.mark.parametrize("most_s", [99.0, 30.0])
def test_what_programs_waited_is_given_back_once(clock, executions, given_back_s, most_s):
    clock.left_s, clock.more_s = 40.0, most_s
    grading = GradingRun(None, LIMITS, stop_on_fail=False)
    for wall_s, run_delay_s in executions:
        result = ExecResult(ExecStatus.OK, isolation=Isolation.NONE)
        grading.record(replace(result, wall_s=wall_s, run_delay_s=run_delay_s))
    clock.left_s = 0.0
    for _ in range(3):
        late = grading.out_of_time()
        assert most_s - clock.more_s == pytest.approx(min(given_back_s, most_s))
        assert (late is None) == (given_back_s > 0)
    clock.left_s = clock.more_s = 0.0
    assert grading.out_of_time()[0] is Verdict.TIMEOUT


@ours
@pytest.mark.parametrize("kind", SUITES)
async def test_no_kind_of_test_starts_without_time_and_hidden_ones_are_skipped(clock, sandbox, kind):
    clock.left_s = 0.5
    result = await grade(sandbox, "def f(x): return x\n", SUITES[kind], limits=LIMITS)
    assert [test.verdict for test in result.tests] == [Verdict.TIMEOUT, Verdict.SKIPPED]
    assert result.num_executions == 0


VERDICTS = st.lists(st.tuples(st.booleans(), st.sampled_from(Verdict)), min_size=1, max_size=6)


@pytest.mark.long
@given(VERDICTS)
def test_feedback_says_nothing_of_a_hidden_test_but_a_count(pairs):
    texts = {name: f"SECRET {name}" for name in ("detail", "shown_input", "shown_expected", "shown_got")}
    tests = tuple(
        TestResult(f"t{i}", visible, verdict, **({} if visible else texts))
        for i, (visible, verdict) in enumerate(pairs)
    )
    assert "SECRET" not in feedback(GradeResult(tests, Integrity.OUTSIDE), max_tests=99)


LEAKY = {
    "functions": "import os\nraise ValueError(os.pread(0, 100_000, 0).decode()[-300:])\n",
    "functions gc": "import gc\ndef f(x): return [t for t in map(repr, gc.get_objects()) if 'secret'.upper() in t]\n",
    "stdio": "import sys\nraise ValueError(sys.stdin.read())\n",
    "asserts": "def f(x): raise ValueError(x)\n",
    "pytest": "import glob\nraise ValueError(''.join(open(path).read() for path in glob.glob('*.py')))\n",
}


@ours
@pytest.mark.long
@pytest.mark.parametrize("name", LEAKY)
async def test_a_program_that_shows_all_it_sees_shows_no_hidden_test(sandbox_with_pytest, name):
    result = await grade(sandbox_with_pytest, LEAKY[name], SUITES[name.split()[0]], limits=LIMITS)
    assert result.score == 0.0
    assert "SECRET" not in feedback(result, max_tests=9)
    assert "SECRET" not in result.load_error


@ours
async def test_feedback_names_the_first_visible_failure_and_how_many_hidden_tests_passed(sandbox):
    suite = FunctionSuite(
        "double",
        visible=(FunctionTest((1,), 2), FunctionTest(([1],), [2]), FunctionTest((None,), None)),
        hidden=(FunctionTest((3,), 6), FunctionTest((0,), 1)),
    )
    result = await grade(sandbox, "def double(x): return x * 2\n", suite, limits=LIMITS)
    assert feedback(result) == (
        "1 of 3 tests passed.\n\nTest visible[1] gave a wrong result.\ninput: double([1])\nexpected: [2]\n"
        "got: [1, 1]\n\n1 of 2 hidden tests passed."
    )
    assert "TypeError: unsupported operand" in feedback(result, max_tests=2)
    assert "hidden" not in feedback(result, hidden_count=False)


@ours
async def test_feedback_of_a_program_that_cannot_be_loaded_shows_why(sandbox):
    suite = FunctionSuite("double", visible=(FunctionTest((1,), 2),))
    result = await grade(sandbox, "def double(x)\n    return 2 * x\n", suite, limits=LIMITS)
    assert feedback(result).startswith("The program could not be loaded.\n")
    assert "def double(x)" in feedback(result)
    assert "SyntaxError: expected ':'" in feedback(result)


@ours
@pytest.mark.long
async def test_a_load_error_is_reported_without_visible_tests_too_by_a_process_that_knows_no_test(sandbox):
    suite = FunctionSuite("f", hidden=(FunctionTest(("SECRET",), 1),))
    result = await grade(sandbox, "def f(x)\n", suite, limits=LIMITS)
    assert "SyntaxError" in feedback(result)
    assert result.num_executions == 2
    result = await grade(sandbox, LEAKY["functions"], suite, limits=LIMITS)
    assert "ValueError" in feedback(result)
    assert "SECRET" not in feedback(result)
    result = await grade(sandbox, "1 / 0\n", AssertSuite(("f",), hidden=(AssertTest("f(1)"),)), limits=LIMITS)
    assert "ZeroDivisionError" in feedback(result)


def test_feedback_is_short_and_holds_no_control_characters():
    test = TestResult("visible[0]", True, Verdict.FAILED, shown_got="x" * 100_000, detail="\x1b[2J\u202e\ud800\0")
    text = feedback(GradeResult((test,), Integrity.OUTSIDE), max_chars=500)
    assert len(text) < 600
    assert not any(character in text for character in "\x1b\u202e\ud800\0")
    text.encode()


def test_all_passed_needs_no_more_words():
    assert feedback(GradeResult((TestResult("a", True, Verdict.PASSED),), Integrity.OUTSIDE)) == "All tests passed."
