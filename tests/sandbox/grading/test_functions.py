"""Functions: the values of calls are judged here; one answer per call, in order, or none of them counts."""

import threading

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox.grading import Comparison, FunctionSuite, FunctionTest, Verdict, functions, grade
from agentenv.sandbox.types import ExecLimits

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = ExecLimits(cpu_s=4.0, wall_s=60.0)


def squares(count, **options):
    """A suite that asks for squares."""
    return FunctionSuite("square", hidden=tuple(FunctionTest((i,), i * i) for i in range(count)), **options)


async def verdicts(sandbox, code, suite, **options):
    """The verdicts of all tests."""
    result = await grade(sandbox, code, suite, **{"limits": LIMITS} | options)
    return [test.verdict.value for test in result.tests]


VALUES = [
    ("1", 1), ("1.0", 1.0), ("True", True), ("None", None),
    ("'é\\ud800'", "é\ud800"), ("b'\\0'", b"\0"), ("(1, [2])", (1, [2])),
    ("{1, 2}", {1, 2}), ("frozenset({(1,)})", frozenset({(1,)})), ("{1: 'a', 'b': {}}", {1: "a", "b": {}}),
    ("2 + 1j", 2 + 1j),
    ("10 ** 5000", 10**5000), ("float('inf')", float("inf")), ("float('nan')", float("nan")), ("-0.0", -0.0),
    ("__import__('collections').Counter('aa')", {"a": 2}), ("__import__('enum').IntEnum('E', 'A').A", 1),
    ("__import__('collections').namedtuple('P', 'x')(1)", (1,)), ("bytearray(b'a')", bytearray(b"a")),
]  # fmt: skip


async def test_every_plain_value_comes_out_as_it_is(sandbox):
    code = "VALUES = [" + ", ".join(text for text, _ in VALUES) + "]\ndef at(index): return VALUES[index]\n"
    suite = FunctionSuite("at", hidden=tuple(FunctionTest((i,), value) for i, (_, value) in enumerate(VALUES)))
    result = await grade(sandbox, code, suite, limits=LIMITS)
    assert [(test.shown_expected, test.shown_got) for test in result.tests if test.verdict is not Verdict.PASSED] == []
    assert result.num_executions == 1


async def test_arguments_arrive_as_they_are_given(sandbox):
    code = "def same(*args, **kwargs): return args, kwargs\n"
    args = (1, 1.0, True, None, "x", b"x", (1,), {1}, [1], {"a": (1,), 2: 3}, 10**400, float("inf"))
    suite = FunctionSuite("same", hidden=(FunctionTest(args, (args, {"key": (1,)}), {"key": (1,)}),))
    assert await verdicts(sandbox, code, suite) == ["passed"]


async def test_thirty_calls_take_one_execution_and_more_take_batches(sandbox):
    code = "def square(n): return n * n\n"
    result = await grade(sandbox, code, squares(30), limits=LIMITS)
    assert (result.all_passed, result.num_executions) == (True, 1)
    result = await grade(sandbox, code, squares(30, batch=10), limits=LIMITS)
    assert (result.all_passed, result.num_executions) == (True, 3)


async def test_visible_and_hidden_calls_never_share_a_process(sandbox):
    code = "seen = []\ndef f(n):\n    seen.append(n)\n    return seen\n"
    suite = FunctionSuite(
        "f", visible=(FunctionTest((1,), [1]), FunctionTest((2,), [1, 2])), hidden=(FunctionTest((3,), [3]),)
    )
    assert await verdicts(sandbox, code, suite) == ["passed"] * 3


async def test_an_exception_is_an_error_of_its_test_only_and_shows_the_solutions_own_frames(sandbox):
    code = (
        "import json\ndef inner(n):\n    return json.loads('x' * n)\n"
        "def square(n):\n    return inner(n) if n == 1 else n * n\n"
    )
    result = await grade(sandbox, code, squares(3), limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == ["passed", "error", "passed"]
    assert result.tests[1].detail.splitlines() == [
        '  File "solution.py", line 5, in square',
        "    return inner(n) if n == 1 else n * n",
        '  File "solution.py", line 3, in inner',
        "    return json.loads('x' * n)",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ]


async def test_a_call_that_ends_the_process_is_blamed_alone(sandbox):
    code = "import os\ndef square(n):\n    if n == 2: os._exit(0)\n    return n * n\n"
    result = await grade(sandbox, code, squares(5), limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == ["passed", "passed", "missing", "passed", "passed"]
    assert (result.tamper_signals, result.num_executions) == (("early_exit",), 3)


async def test_after_three_calls_that_end_a_process_the_rest_is_missing(sandbox):
    code = "import os\ndef square(n): os._exit(7)\n"
    result = await grade(sandbox, code, squares(30), limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == ["error"] * 3 + ["missing"] * 27
    assert result.num_executions == 3


@pytest.mark.long
async def test_a_call_has_the_whole_limit_for_itself(sandbox):
    # Together they use more than the limit of one, and none of them does.
    code = (
        "import time\ndef square(n):\n    end = time.process_time() + 0.5\n"
        "    while time.process_time() < end: pass\n    return n * n\n"
    )
    limits = ExecLimits(cpu_s=1.0, wall_s=200.0)
    assert await verdicts(sandbox, code, squares(3), limits=limits) == ["passed"] * 3


@pytest.mark.long
async def test_an_endless_call_is_a_timeout_and_a_greedy_one_goes_beyond_a_limit(sandbox):
    code = "def square(n):\n    while n == 1: pass\n    return n * n\n"
    assert await verdicts(sandbox, code, squares(3), limits=ExecLimits(cpu_s=0.5, wall_s=200.0)) == [
        "passed", "timeout", "passed",
    ]  # fmt: skip


async def test_stopping_leaves_the_tests_after_a_failure_out(sandbox):
    code = "def square(n): return 1\n"
    suite = FunctionSuite("square", visible=(FunctionTest((1,), 1),), hidden=squares(4, batch=2).hidden, batch=2)
    result = await grade(sandbox, code, suite, limits=LIMITS, stop_on_fail=True)
    assert [test.verdict.value for test in result.tests] == ["passed", "failed", "passed", "skipped", "skipped"]
    assert (result.score, result.num_executions) == (0.4, 2)


async def test_a_class_has_a_fresh_instance_for_each_call(sandbox):
    code = "class Solution:\n    n = 0\n    def up(self, by):\n        self.n += by\n        return self.n\n"
    for name in ("Solution.up", "up"):
        suite = FunctionSuite(name, hidden=(FunctionTest((1,), 1), FunctionTest((2,), 2)))
        assert await verdicts(sandbox, code, suite) == ["passed", "passed"]


async def test_a_program_without_that_name_is_an_error_that_says_so(sandbox):
    suite = FunctionSuite("square", visible=(FunctionTest((1,), 1),))
    result = await grade(sandbox, "def sqare(n): return n\n", suite, limits=LIMITS)
    assert result.tests[0].verdict is Verdict.ERROR
    assert "solution.py defines no 'square'" in result.tests[0].detail


async def test_the_main_part_of_a_solution_does_not_run_and_its_input_is_empty(sandbox):
    code = "import sys\nrest = sys.stdin.read()\ndef f(x): return rest\nif __name__ == '__main__': sys.exit(3)\n"
    suite = FunctionSuite("f", hidden=tuple(FunctionTest(("x" * 100_000,), "") for _ in range(3)))
    assert await verdicts(sandbox, code, suite) == ["passed"] * 3


async def test_a_prelude_is_there_before_the_solution(sandbox):
    prelude = "import math\nfrom typing import List"
    suite = FunctionSuite(
        "area", hidden=(FunctionTest((1.0,), 3.14159),), prelude=prelude, comparison=Comparison(rel_tol=1e-4)
    )
    code = "from __future__ import annotations\nxs: List[int] = []\ndef area(r): return math.pi * r * r\n"
    assert await verdicts(sandbox, code, suite) == ["passed"]


async def test_a_dataclass_in_a_solution_works(sandbox):
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def f(x): return P(x).x\n"
    )
    assert await verdicts(sandbox, code, FunctionSuite("f", hidden=(FunctionTest((1,), 1),))) == ["passed"]


async def test_prints_are_not_answers(sandbox):
    code = 'print(\'{"ready":true}\')\ndef square(n):\n    print(\'{"id":0,"value":0}\')\n    return n * n\n'
    assert await verdicts(sandbox, code, squares(2)) == ["passed", "passed"]


@pytest.mark.long
async def test_a_right_value_of_several_megabytes_passes_and_a_wrong_one_may_not_be_larger(sandbox):
    tests = (FunctionTest((0,), ["x" * 3_000_000, list(range(250_000))]), FunctionTest((1,), 1))
    code = "def at(n): return [['x' * 3_000_000, list(range(250_000))], 1][n]\n"
    limits = ExecLimits(cpu_s=20.0, wall_s=60.0)
    assert await verdicts(sandbox, code, FunctionSuite("at", hidden=tests), limits=limits) == ["passed", "passed"]
    assert await verdicts(sandbox, code, FunctionSuite("at", hidden=tests[1:] * 2), limits=limits) == ["passed"] * 2
    code = "def at(n): return 'x' * 300_000\n"
    assert await verdicts(sandbox, code, FunctionSuite("at", hidden=tests[1:]), limits=limits) == ["error"]


async def test_large_values_that_fill_the_channel_together_are_all_judged(sandbox):
    code = "def f(n): return 'x' * 200_000\n"
    suite = FunctionSuite("f", hidden=tuple(FunctionTest((i,), "x" * 200_000) for i in range(12)))
    assert await verdicts(sandbox, code, suite) == ["passed"] * 12


# --- checkers ---------------------------------------------------------------------------------------------------------


def close_to_a_root(args, expected, got):
    return abs(got * got - args[0]) < 1e-6


@pytest.mark.parametrize(("length", "beside"), [(1, set()), (20_000, {"read_answers", "decode", "same_value"})])
async def test_a_large_answer_is_read_and_judged_beside_the_event_loop(sandbox, monkeypatch, length, beside):
    seen = set()

    def noting(name, function):
        def noted(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                seen.add(name)
            return function(*args, **kwargs)

        return noted

    for name in ("read_answers", "decode", "same_value"):
        monkeypatch.setattr(functions, name, noting(name, getattr(functions, name)))
    suite = FunctionSuite("many", hidden=(FunctionTest((length,), list(range(length))),))
    assert await verdicts(sandbox, "def many(n): return list(range(n))\n", suite) == ["passed"]
    assert seen == beside


async def test_a_checker_judges_instead(sandbox):
    suite = FunctionSuite("root", hidden=(FunctionTest((2.0,), 2**0.5),), checker=close_to_a_root)
    assert await verdicts(sandbox, "def root(x): return -x ** 0.5\n", suite) == ["passed"]
    assert await verdicts(sandbox, "def root(x): return x\n", suite) == ["failed"]
    assert await verdicts(sandbox, "def root(x): return 'it cannot read this'\n", suite) == ["failed"]


@pytest.mark.parametrize("checker", [lambda *_: 1 / 0, lambda *_: 1, lambda *_: None], ids=["raises", "int", "none"])
async def test_a_checker_that_judges_nothing_is_an_infra_failure(sandbox, checker):
    suite = FunctionSuite("root", hidden=(FunctionTest((2.0,), 2**0.5),), checker=checker)
    result = await grade(sandbox, "def root(x): return 'two'\n", suite, limits=LIMITS)
    assert (result.sandbox_failed, result.score, result.all_passed) == (True, None, None)
    assert "expected a bool" in result.infra_detail


# --- tampering --------------------------------------------------------------------------------------------------------


async def test_a_broken_protocol_fails_every_test_of_its_process(sandbox):
    code = 'import os\ndef square(n):\n    os.write(3, b\'{"id":0,"value":0}\\n\')\n    return n * n\n'
    result = await grade(sandbox, code, squares(3), limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == ["protocol"] * 3
    assert result.tamper_signals == ("broken_protocol",)


@pytest.mark.parametrize(
    ("body", "signal"),
    [
        ("sys._getframe()", "frame_walk"),
        ("gc.get_objects()", "gc_scan"),
        ("sys.settrace(None)", "trace"),
        ("sys.exit(0)", "exit_in_call"),
        ("socket.socket()", "network"),
    ],
)
async def test_suspicious_code_is_noted_and_judged_like_any_other(sandbox, body, signal):
    code = (
        "import contextlib, gc, socket, sys\n"
        f"def square(n):\n    with contextlib.suppress(OSError): {body}\n    return n * n\n"
    )
    result = await grade(sandbox, code, squares(1), limits=LIMITS)
    assert signal in result.tamper_signals
    assert result.score == (0.0 if signal == "exit_in_call" else 1.0)


async def test_libraries_may_do_what_a_solution_has_no_use_for(sandbox):
    code = "from collections import namedtuple\nP = namedtuple('P', 'x')\ndef square(n): return P(n * n).x\n"
    assert (await grade(sandbox, code, squares(1), limits=LIMITS)).tamper_signals == ()


async def test_input_that_is_not_a_suite_is_refused(sandbox):
    with pytest.raises(ConfigError, match="expected a suite of tests"):
        await grade(sandbox, "", ("1", "1"))
