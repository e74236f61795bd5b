"""Programs that read and print: what they must print stays outside."""

from dataclasses import replace

import pytest

from agentenv.sandbox.grading import Comparison, StdioSuite, StdioTest, Verdict, grade
from agentenv.sandbox.types import ExecLimits
from tests.sandbox.grading.conftest import Wrapped

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = ExecLimits(cpu_s=4.0, wall_s=60.0)
DOUBLE = "print(int(input()) * 2)\n"
DOUBLES = StdioSuite(visible=(StdioTest("1\n", "2\n"),), hidden=(StdioTest("4\n", "8\n"), StdioTest("-3\n", "-6\n")))


async def graded(sandbox, code, expected, *, stdin="", **options):
    """The one result of a suite of one visible test."""
    result = await grade(sandbox, code, StdioSuite(visible=(StdioTest(stdin, expected),), **options), limits=LIMITS)
    return result.tests[0]


async def test_the_right_output_and_a_failing_exit_is_an_error(sandbox):
    test = await graded(sandbox, "print(3)\nraise SystemExit(1)\n", "3\n")
    assert (test.verdict, test.detail) == (Verdict.ERROR, "the program ended with exit code 1")


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("print(3)\nraise SystemExit(1)", "passed"),
        ("import os\nos.write(1, b'3')\nos._exit(7)", "passed"),
        ("import sys\nprint(3)\nsys.exit('done')", "passed"),
        ("print(4)\nraise SystemExit(1)", "error"),
        ("print(3)\nraise ValueError", "error"),
        ("print(3)\n1 +", "error"),
        ("import os\nprint(3, flush=True)\nos.abort()", "error"),
    ],
)
async def test_any_exit_code_is_accepted_on_request_but_no_exception(sandbox, code, verdict):
    suite = StdioSuite(hidden=(StdioTest("", "3\n"),), any_exit_code=True)
    assert (await grade(sandbox, code, suite, limits=LIMITS)).tests[0].verdict.value == verdict


async def test_a_program_that_cannot_be_compiled_does_not_print_nothing(sandbox):
    suite = StdioSuite(hidden=(StdioTest("", ""),), any_exit_code=True)
    assert (await grade(sandbox, "1 +", suite, limits=LIMITS)).score == 0.0


@pytest.mark.long
async def test_the_right_output_before_a_limit_is_not_a_pass(sandbox):
    suite = StdioSuite(hidden=(StdioTest("", "3\n"),))
    code = "print(3, flush=True)\nwhile True: pass\n"
    result = await grade(sandbox, code, suite, limits=ExecLimits(cpu_s=0.3, wall_s=200.0))
    assert result.tests[0].verdict is Verdict.TIMEOUT


@pytest.mark.long
async def test_a_program_that_hangs_costs_a_few_tests_time(sandbox):
    suite = StdioSuite(hidden=tuple(StdioTest(f"{i}\n", f"{i}\n") for i in range(12)))
    result = await grade(sandbox, "while True: pass", suite, limits=ExecLimits(cpu_s=0.2, wall_s=200.0))
    assert result.score == 0.0
    assert result.count(Verdict.TIMEOUT) + result.count(Verdict.MISSING) == 12
    assert 3 <= result.num_executions < 3 + sandbox.run_slots


@pytest.mark.parametrize(
    ("written", "expected", "mode", "passes"),
    [
        (b"\x1b[1mbold\r\n\0\x7f", "\x1b[1mbold\r\n\0\x7f", "exact", True),
        (rb"\x1b[1m", "\x1b[1m", "exact", False),
        (b"a\r\n", "a\n", "exact", False),
        (b"a\n", "a\r\n", "exact", False),
        (b"\xff", r"\xff", "exact", False),
        (b"\xff", r"\xff", "lines", False),
        (b"a\r\nb\r\n", "a\nb\n", "lines", True),
        (b"a\x1fb\n", "a\x1fb\n", "lines", True),
        (b"1\n2", "1 2", "tokens", True),
        (b"0.33333", "0.3333333", "floats", True),
        (b"0.4", "0.3333333", "floats", False),
    ],
)
async def test_the_written_output_is_compared_and_not_its_display(sandbox, written, expected, mode, passes):
    code = f"import sys; sys.stdout.buffer.write({written!r})"
    test = await graded(sandbox, code, expected, mode=mode, comparison=Comparison(rel_tol=1e-4))
    assert test.verdict is (Verdict.PASSED if passes else Verdict.FAILED)


class TextAlone(Wrapped):
    async def run(self, program, **options):
        return replace(await super().run(program, **options), stdout_data=None)


async def test_a_backend_with_text_alone_compares_that(sandbox):
    for expected, verdict in (("\x1b3\n", Verdict.PASSED), ("\\x1b3\n", Verdict.FAILED)):
        test = await graded(TextAlone(sandbox), "print('\\x1b3')", expected, mode="exact")
        assert test.verdict is verdict


async def test_output_that_was_cut_is_not_a_pass(sandbox):
    test = await graded(sandbox, "print(3)\nprint(' ' * 3_000_000 + 'x')\n", "3\n")
    assert test.verdict is Verdict.LIMIT


async def test_expected_output_that_is_larger_than_what_is_kept_is_kept(sandbox):
    text = "".join(f"{i}\n" for i in range(40_000))
    assert (await graded(sandbox, "for i in range(40_000): print(i)", text)).verdict is Verdict.PASSED


async def test_an_exception_shows_the_programs_own_frames(sandbox):
    code = "import json\ndef read():\n    return json.loads('{')\nread()\n"
    test = await graded(sandbox, code, "")
    assert test.verdict is Verdict.ERROR
    assert "read()" in test.detail
    assert "json.decoder.JSONDecodeError" in test.detail
    assert "scan_once" not in test.detail
    assert "/lib" not in test.detail


async def test_a_checker_sees_the_input_and_what_was_printed(sandbox):
    def factors(stdin, expected, got):
        return len(got.split()) == 2 and int(got.split()[0]) * int(got.split()[1]) == int(stdin)

    for code, verdict in (("print(3, 4)", "passed"), ("print(2, 5)", "failed"), ("print('x', 'y')", "failed")):
        assert (await graded(sandbox, code, "2 6", stdin="12", checker=factors)).verdict.value == verdict


async def test_stopping_leaves_the_tests_after_a_failure_out(sandbox):
    result = await grade(sandbox, "print(2)", DOUBLES, limits=LIMITS, stop_on_fail=True)
    assert [test.verdict.value for test in result.tests] == ["passed", "failed", "skipped"]
    assert result.num_executions == 2
