"""Tests by proxy: they run where the solution's text is not, and reach its functions over the parent."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from agentenv.errors import InfraError
from agentenv.sandbox.grading import AssertSuite, AssertTest, Verdict, asserts, grade
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus
from tests.sandbox.conftest import opened

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = ExecLimits(cpu_s=4.0, wall_s=60.0)
ENDLESS = ExecLimits(cpu_s=0.5, wall_s=200.0)
"""For what never ends: enough for what does, and time to use it up beside others."""
ADD = "def add(a, b): return a + b\n"


def suite(*sources, names=("add",), **options):
    """Hidden tests of these sources."""
    return AssertSuite(names, hidden=tuple(map(AssertTest, sources)), **options)


async def verdicts(sandbox, code, tests, **options):
    """The verdicts of all tests."""
    result = await grade(sandbox, code, tests, **{"limits": LIMITS} | options)
    assert result.infra_detail == ""
    return [test.verdict.value for test in result.tests]


async def test_asserts_are_judged_one_by_one(sandbox):
    tests = suite(
        "assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert candidate('a', 'b') == 'ab'", "add(1)", "1 +"
    )
    result = await grade(sandbox, ADD, tests, limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == ["passed", "failed", "passed", "error", "error"]
    assert (result.integrity.value, result.num_executions) == ("proxy", 2)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_kill_of_the_tests_process_by_the_host_is_no_verdict_if_it_is_killed_alone_too(
    sandbox, monkeypatch, times
):
    ends = [InfraError("the tests' sandbox failed: host: a kill")] * times
    examine_pair = asserts._examine_pair

    async def killed(*args, **kwargs):
        if ends:
            raise ends.pop()
        return await examine_pair(*args, **kwargs)

    monkeypatch.setattr(asserts, "_examine_pair", killed)
    result = await grade(sandbox, ADD, suite("assert add(1, 2) == 3"), limits=LIMITS)
    assert (result.score, result.infra_detail != "") == ((1.0, False) if times == 1 else (None, True))


SWALLOWS = "try:\n    assert add(1, 2) == 3\nexcept {}:\n    {}"
EXPECTS = "try:\n    add(None, 1){}\nexcept {}:\n    {}"
BOTH = WRONG, RAISES = "def add(a, b): return a and 4", "def add(a, b): raise TypeError"
EMPTY = "def add(a, b): return []"


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        (SWALLOWS.format("Exception", "pass"), True, BOTH),
        (SWALLOWS.format("(AssertionError, ValueError) as error", "print(error)"), True, BOTH),
        ("from contextlib import suppress\nwith suppress(BaseException):\n    assert add(1, 2) == 3", True, BOTH),
        ("def one():\n    try:\n        assert add(1, 2) == 3\n    finally:\n        return\none()", True, BOTH),
        ("def is_right(a):\n    " + SWALLOWS.format("Exception", "return True").replace("\n", "\n    ")
         + "\n    return True\nassert is_right(1)", True, BOTH),
        ("def is_right(a):\n    " + SWALLOWS.format("Exception", "return False").replace("\n", "\n    ")
         + "\n    return True\nassert not is_right(1)", False, ()),
        (EXPECTS.format("\n    assert False", "TypeError", "pass"), True, (WRONG,)),
        (EXPECTS.format("\n    assert False", "Exception", "pass"), True, (WRONG,)),
        (EXPECTS.format("", "TypeError", "pass\nelse:\n    assert False"), True, (WRONG,)),
        (
            "try:\n    assert add(None, 1) == 0\nexcept Exception as e:\n    assert isinstance(e, TypeError)",
            True,
            (WRONG,),
        ),
        ("for each in add([1], [2]):\n    assert each > 0", True, (EMPTY,)),
        ("if add(1, 2):\n    assert add(1, 2) == 3", True, ("def add(a, b): return 0",)),
        ("assert all(each > 0 for each in add([1], [2]))", True, (EMPTY,)),
        ("assert not any(each < 0 for each in add([1], [2]))", True, (EMPTY,)),
        ("assert add([], []) == []\nassert all(add([], []))", True, ()),
        ("assert add(0, 0) == any([])", True, ()),
    ],
)  # fmt: skip
async def test_a_test_passes_only_by_an_assert_that_held(sandbox, test, right, wrong):
    assert await verdicts(sandbox, ADD, suite(test)) == ["passed" if right else "failed"]
    for code in wrong:
        assert await verdicts(sandbox, code, suite(test)) != ["passed"]


async def test_functions_named_test_are_called(sandbox):
    source = "def test_one():\n    assert add(1, 1) == 2\ndef test_two():\n    assert add(1, 1) == 3\n"
    assert await verdicts(sandbox, ADD, suite(source)) == ["failed"]


async def test_several_functions_share_the_solutions_state(sandbox):
    code = "n = 0\ndef up(by=1):\n    global n\n    n += by\ndef get(): return n\n"
    assert await verdicts(sandbox, code, suite("up()\nup(by=2)\nassert get() == 3", names=("up", "get"))) == ["passed"]


async def test_the_tests_cannot_find_the_solution_and_the_solution_cannot_find_the_tests(sandbox):
    tests = suite(
        "import gc, sys\nadd(0, 0)\nassert 'solution' not in sys.modules\n"
        "assert not [1 for each in gc.get_objects() if type(each) is dict and 'SECRET' + '_OF_THE_SOLUTION' in each]",
        "assert add(0, 0) == 0  # the tests' secret",
    )
    code = (
        "SECRET_OF_THE_SOLUTION = 1\nimport gc, sys\ndef add(a, b):\n"
        "    frame, words = sys._getframe(1), 'the tests' + chr(39) + ' secret'\n"
        "    while frame:\n"
        "        assert words not in str(frame.f_locals) + str(frame.f_globals)\n"
        "        frame = frame.f_back\n"
        "    return a + b\n"
    )
    assert await verdicts(sandbox, code, tests) == ["passed", "passed"]


async def test_exceptions_cross_by_their_nearest_built_in_class(sandbox):
    code = (
        "class Mine(KeyError): pass\nclass Odd(Exception): pass\n"
        "def add(a, b):\n    raise {1: ValueError, 2: Mine, 3: Odd}[a](b)\n"
    )
    source = "try:\n    add({}, 'why')\nexcept {} as error:\n    assert 'why' in str(error)\nelse:\n    assert False\n"
    tests = suite(
        *(source.format(*pair) for pair in ((1, "ValueError"), (2, "KeyError"), (3, "Exception"), (3, "OSError")))
    )
    assert await verdicts(sandbox, code, tests) == ["passed", "passed", "passed", "error"]


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "type('Mine', (StopIteration,), {})"])
async def test_a_solution_that_stops_iteration_passes_no_test_that_calls_it_in_a_loop(sandbox, error):
    tests = suite(
        "assert all(map(lambda n: add(n, 1) == n + 1, range(3)))", "for n in iter(lambda: add(0, 1), 1): pass"
    )
    assert await verdicts(sandbox, f"def add(a, b): raise {error}\n", tests) == ["error", "error"]


@pytest.mark.parametrize("how", ["os._exit(0)", "__import__('ctypes').string_at(0)", "os.close(3); os._exit(0)"])
async def test_a_solution_that_exited_passes_no_test_that_forgives_exceptions(sandbox, how):
    code = f"import os\ndef add(a, b): {how}\n"
    source = "try:\n    add(1, 2)\nexcept BaseException:\n    pass\n"
    assert set(await verdicts(sandbox, code, suite(source, source))) <= {"missing", "error"}


async def test_leaving_at_import_passes_no_test_that_asserts_nothing(sandbox):
    assert await verdicts(sandbox, "import os\nos._exit(0)\n", suite("pass")) == ["missing"]
    assert await verdicts(sandbox, "raise ValueError\n", suite("pass")) == ["error"]


async def test_a_test_that_ends_the_solution_is_blamed_alone(sandbox):
    code = "import os\ndef add(a, b):\n    if a == 1: os._exit(3)\n    return a + b\n"
    tests = suite(*(f"assert add({i}, 0) == {i}" for i in range(4)))
    assert await verdicts(sandbox, code, tests) == ["passed", "error", "passed", "passed"]


@pytest.mark.long
async def test_an_endless_call_is_a_timeout_of_its_test(sandbox):
    code = "def add(a, b):\n    while a == 1: pass\n    return a + b\n"
    tests = suite("assert add(1, 0) == 1", "assert add(2, 0) == 2")
    assert await verdicts(sandbox, code, tests, limits=ENDLESS) == ["timeout", "passed"]


KEEPS_WAITING = {
    "closes": "import os, time\ndef add(a, b):\n    os.close(3)\n    time.sleep(60)\n",
    "does not read": "import os, time\nos.write(3, b'{\"ready\":true}\\n')\ntime.sleep(60)\n",
    "answers much": (
        "import os, time\nos.write(3, b'{\"ready\":true}\\n')\n"
        "end, value = time.monotonic() + 4.5, b'0,' * 150_000 + b'0'\n"
        "for number in range(1, 1000):\n"
        "    while not os.read(3, 1 << 16).endswith(b'\\n'): pass\n"
        "    if time.monotonic() > end: time.sleep(60)\n"
        '    os.write(3, b\'{"id":%d,"value":[%b]}\\n\' % (number, value))\n'
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("how", KEEPS_WAITING)
async def test_a_solution_that_keeps_the_tests_waiting_is_timed_out_and_never_loses_its_grade(sandbox, how):
    tests = suite(f"for n in range(1000): add('{'x' * 900_000 * (how == 'does not read')}', n)")
    result = await grade(sandbox, KEEPS_WAITING[how], tests, limits=ExecLimits(cpu_s=10.0, wall_s=6.0))
    assert result.tests[0].verdict is Verdict.TIMEOUT, result.infra_detail


@pytest.mark.parametrize(
    ("cpu_s", "run_delay_s", "most"), [(3.0, 0.0, True), (5.0, 0.0, False), (1.0, 3.5, False), (1.0, 1.5, True)]
)
async def test_the_time_in_which_the_tests_compute_or_wait_for_a_core_counts_as_the_solutions_whose_values_may_cost_it(
    monkeypatch, cpu_s, run_delay_s, most
):
    async def kill():
        return ExecResult(ExecStatus.OK, cpu_s=cpu_s, run_delay_s=run_delay_s)

    monkeypatch.setattr(asserts, "time", SimpleNamespace(monotonic=lambda: 110.0))
    relay = SimpleNamespace(
        _grading=SimpleNamespace(limits=ExecLimits(wall_s=10.0)), _started=100.0,
        _questions=SimpleNamespace(waited_s=9.0), _examiner=SimpleNamespace(kill=kill),
    )  # fmt: skip
    assert await asserts._Relay._tests_took_most(relay) is most


async def test_a_pair_of_sandboxes_waits_for_a_run_slot_as_every_program_does(monkeypatch):
    waiting = asyncio.Event()
    monkeypatch.setattr("agentenv.sandbox.local.queue.waiting", lambda: contextlib.nullcontext(waiting.set()))
    async with await opened(run_slots=1) as sandbox:
        async with sandbox.turn():
            grading = asyncio.create_task(verdicts(sandbox, ADD, suite("assert add(1, 2) == 3")))
            waits = asyncio.create_task(waiting.wait())
            await asyncio.wait([grading, waits], return_when="FIRST_COMPLETED")
            assert not waits.cancel()  # it is done
        assert await grading == ["passed"]


@pytest.mark.long
async def test_tests_that_wait_themselves_are_no_timeout_of_the_solution(sandbox):
    tests = suite("import time\ntime.sleep(16)\nassert add(1, 2) == 3")
    result = await grade(sandbox, ADD, tests, limits=ExecLimits(cpu_s=4.0, wall_s=8.0))
    assert result.score is None
    assert "the tests themselves" in result.infra_detail


@pytest.mark.long
async def test_a_value_that_makes_the_test_itself_endless_is_not_a_pass(sandbox):
    result = await grade(
        sandbox, "def add(a, b): return 10**9\n", suite("for i in range(add(0, 0)): pass\nassert False"),
        limits=ENDLESS,
    )  # fmt: skip
    assert result.tests[0].verdict is Verdict.TIMEOUT
    assert "the test itself" in result.tests[0].detail


async def test_changes_of_arguments_do_not_cross(sandbox):
    code = "def add(a, b):\n    a += b\n"
    assert await verdicts(sandbox, code, suite("xs = [1]\nadd(xs, [2])\nassert xs == [1, 2]")) == ["failed"]
    cheat = "def add(a, b):\n    a.clear()\n    return []\n"
    assert await verdicts(sandbox, cheat, suite("xs = [2, 1]\nassert add(xs, 0) == sorted(xs)")) == ["failed"]


WRITES = "import os\ndef add(a, b):\n    if a == {}: os.write(3, b'{}')\n    return a + b\n"
SENDS = (
    f"{ADD}import os, sys\nLines = sys.modules['__main__'].Lines\nsend = Lines.send\nLines.send = lambda self, line: "
)


@pytest.mark.parametrize(
    "code",
    [
        WRITES.format(1, '{"id":1,"value":3,"args":[[],0]}\\n'),
        WRITES.format(1, '{"id":1,"value":3}\\n{"id":2,"value":7}\\n'),
        WRITES.format(3, '{"id":2,"value":7}\\n'),
        SENDS + "[send(self, line) for _ in range(1 + (b'signals' in line))]\n",
    ],
    ids=["another key", "ahead of its call", "twice", "after the last one"],
)
async def test_any_other_line_breaks_the_protocol(sandbox, code):
    tests = suite("assert add(1, 2) == 3\nassert add(3, 4) == 7")
    result = await grade(sandbox, code, tests, limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == ["protocol"]
    assert result.tamper_signals == ("broken_protocol",)


async def test_a_solution_that_exits_after_the_last_test_is_not_run_again(sandbox):
    code = SENDS + "os._exit(0) if b'signals' in line else send(self, line)\n"
    result = await grade(sandbox, code, suite("assert add(1, 2) == 3", "assert add(2, 2) == 4"), limits=LIMITS)
    assert (result.score, result.num_executions, result.tamper_signals) == (1.0, 2, ("early_exit",))


@pytest.mark.parametrize("value", ["lambda: 0", "object()", "(i for i in ())", "'x' * 10**8"])
async def test_values_that_cannot_be_sent_are_an_error(sandbox, value):
    assert await verdicts(sandbox, f"def add(a, b): return {value}\n", suite("add(1, 2)")) == ["error"]


@pytest.mark.parametrize("expected", ["ValueError", "Exception", "BaseException"])
async def test_an_exception_that_a_test_cannot_send_cannot_be_expected(sandbox, expected):
    source = f"try:\n    add(lambda: 0, 1)\nexcept {expected}:\n    pass\n"
    assert await verdicts(sandbox, ADD, suite(source)) == ["error"]


async def test_a_value_may_be_as_large_as_the_channel(sandbox):
    code = "def add(a, b): return 'x' * a\n"
    tests = suite("assert add(1_000_000, 0) == 'x' * 1_000_000", "assert add(1_100_000, 0)")
    assert await verdicts(sandbox, code, tests) == ["passed", "error"]


async def test_tests_may_call_the_solution_with_more_than_it_may_answer(sandbox):
    code = "def add(a, b): return 'x' * 200_000 if a == 0 else len(a)\n"
    assert await verdicts(sandbox, code, suite("assert add([add(0, 0)] * 8, 0) == 8")) == ["passed"]


async def test_members_of_one_hash_that_the_tests_put_together_are_an_error(sandbox):
    code = "def add(a, b): return {n * (2 ** 61 - 1) for n in range(a, a + 600)} if b else 1\n"
    tests = suite("add(set().union(*(add(600 * n, 1) for n in range(1, 9))), 0)")
    assert await verdicts(sandbox, code, tests) == ["error"]


async def test_a_failure_names_the_last_call(sandbox):
    test = (await grade(sandbox, ADD, suite("x = 1\nassert add(x, 1) == 3"), limits=LIMITS)).tests[0]
    assert (test.shown_got, test.detail) == ("add(1, 1) returned 2", "assert add(x, 1) == 3\nAssertionError")


async def test_preludes_are_apart(sandbox):
    tests = suite("assert add(1, 2) == size([1, 2, 3])", prelude="size = len", solution_prelude="import math")
    code = "def add(a, b):\n    assert 'size' not in globals()\n    return math.floor(a + b)\n"
    assert await verdicts(sandbox, code, tests) == ["passed"]


async def test_stopping_leaves_the_tests_after_a_failure_out(sandbox):
    tests = AssertSuite(("add",), visible=(AssertTest("assert add(1, 1) == 3"),), hidden=suite("add(1, 2)").hidden)
    assert await verdicts(sandbox, ADD, tests, stop_on_fail=True) == ["failed", "skipped"]
    tests = suite("assert False", "assert add(1, 1) == 2")
    assert await verdicts(sandbox, ADD, tests, stop_on_fail=True) == ["failed", "skipped"]
