"""The cheat matrix: graders that judge outside of the program's interpreter are fooled by none; the other says so."""

import pytest

from agentenv.sandbox.grading import (
    AssertSuite,
    AssertTest,
    FunctionSuite,
    FunctionTest,
    Integrity,
    PytestSuite,
    StdioSuite,
    StdioTest,
    Verdict,
    grade,
)
from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.types import ExecLimits, Isolation, SandboxUnavailable
from tests.sandbox.grading.cheats import CHEATS, HONEST, MAIN

pytestmark = pytest.mark.asyncio(loop_scope="module")
SUMS = ((1, 2, 3), (10, -4, 6), (20, 22, 42))
TESTS = "".join(f"def test_{i}():\n    assert add({a}, {b}) == {c}\n" for i, (a, b, c) in enumerate(SUMS))
SUITES = {
    "stdio": StdioSuite(hidden=tuple(StdioTest(f"{a} {b}\n", f"{c}\n") for a, b, c in SUMS)),
    "functions": FunctionSuite("add", hidden=tuple(FunctionTest((a, b), c) for a, b, c in SUMS)),
    "asserts": AssertSuite(("add",), hidden=tuple(AssertTest(f"assert add({a}, {b}) == {c}") for a, b, c in SUMS)),
}
PYTEST = PytestSuite(
    {"test_add.py": f"from solution import add\n\n\n{TESTS}".encode()},
    hidden=tuple(f"test_add.py::test_{i}" for i in range(len(SUMS))),
)
LIMITS = ExecLimits(cpu_s=4.0, wall_s=60.0)
SHORT = ExecLimits(cpu_s=0.3, wall_s=2.0)
TAMPERED = (
    "equals_everything", "patches_runtest", "forges_reports_of_every_test", "edits_the_tests",
    "patches_runtest_by_the_source", "equals_the_least_expectation",
)  # fmt: skip
"""Those for which the fast tests start pytest."""


def program(suite, code):
    return code + MAIN if isinstance(suite, StdioSuite) else code


def by_name(cheats):
    return [pytest.param(cheat, id=cheat.name) for cheat in cheats]


@pytest.mark.long
@pytest.mark.parametrize("suite", [*SUITES.values(), PYTEST], ids=[*SUITES, "pytest"])
async def test_an_honest_solution_passes_every_grader(sandbox_with_pytest, suite):
    result = await grade(sandbox_with_pytest, program(suite, HONEST), suite, limits=LIMITS)
    assert (result.score, result.tamper_signals) == (1.0, ())


async def refused(sandbox, kind, cheat, *, stop_on_fail):
    """Check that a cheat passes nothing, and that this is not for want of a sandbox."""
    suite = SUITES[kind]
    limits = SHORT if cheat.hangs else LIMITS
    result = await grade(sandbox, program(suite, cheat.code), suite, limits=limits, stop_on_fail=stop_on_fail)
    assert not any(test.verdict is Verdict.PASSED for test in result.tests), (cheat.name, result)
    assert result.integrity in (Integrity.OUTSIDE, Integrity.PROXY)
    # A busy host is told from a program that hangs, so that one may be graded as unknown.
    assert result.score == 0.0 or (cheat.hangs and result.score is None), (cheat.name, result)


@pytest.mark.long
@pytest.mark.parametrize("cheat", by_name(CHEATS))
@pytest.mark.parametrize("kind", SUITES)
async def test_no_cheat_passes_a_test_that_is_judged_outside(sandbox, kind, cheat):
    await refused(sandbox, kind, cheat, stop_on_fail=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUITES)
@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LANDLOCK])
async def test_no_cheat_passes_any_of_several_tests_at_any_level(level, kind):
    try:
        async with LocalSandbox(isolation=level) as opened:
            # Each of them once at the weaker level: it has the same graders.
            some = CHEATS if level is Isolation.NAMESPACES else CHEATS[list(SUITES).index(kind) :: len(SUITES)]
            for cheat in some:
                await refused(opened, kind, cheat, stop_on_fail=False)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def fooled_by(sandbox, cheat):
    """Whether pytest beside the cheat is fooled, after checks of what must hold either way."""
    limits = ExecLimits(cpu_s=5.0, wall_s=10.0) if cheat.hangs else LIMITS
    result = await grade(sandbox, cheat.code, PYTEST, limits=limits, stop_on_fail=True)
    assert result.score is not None or cheat.hangs, (cheat.name, result)
    assert result.integrity is Integrity.IN_PROCESS
    if not cheat.in_process:
        assert not any(test.verdict is Verdict.PASSED for test in result.tests), (cheat.name, result)
    return bool(result.all_passed), result.tamper_signals


@pytest.mark.long
@pytest.mark.parametrize("cheat", by_name([cheat for cheat in CHEATS if cheat.name in TAMPERED]))
async def test_pytest_in_the_process_of_the_solution_is_fooled_only_by_the_listed_cheats(sandbox_with_pytest, cheat):
    assert (await fooled_by(sandbox_with_pytest, cheat))[0] is cheat.in_process


@pytest.mark.slow
async def test_pytest_in_the_process_of_the_solution_is_fooled_by_three_cheats_of_which_one_leaves_no_signal(
    sandbox_with_pytest,
):
    outcomes = {cheat.name: await fooled_by(sandbox_with_pytest, cheat) for cheat in CHEATS}
    fooled = {name: signals for name, (is_so, signals) in outcomes.items() if is_so}
    assert fooled.keys() == {cheat.name for cheat in CHEATS if cheat.in_process}
    assert {name for name, signals in fooled.items() if "test_file_open" not in signals} == {
        "equals_the_least_expectation"
    }
