"""pytest beside the solution: evidence, which must be complete and agree with itself."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentenv.errors import ConfigError, DataError
from agentenv.sandbox.grading import PytestSuite, grade, in_process
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = ExecLimits(cpu_s=10.0, wall_s=120.0)
SOLUTION = "def add(a, b): return a + b\n"
TESTS = b"""
import unittest
import pytest
from helpers import three
from solution import add

def test_plain():
    assert add(1, 2) == three()

@pytest.mark.parametrize("a", [1, 2])
def test_many(a):
    assert add(a, 0) == a
    assert add(a, 1) > a

def test_raises():
    with pytest.raises(TypeError):
        add(1, "")

@pytest.fixture
def one():
    return 1

class TestGroup:
    def test_method(self, one):
        assert add(one, 1) is not None

class Old(unittest.TestCase):
    def test_old(self):
        self.assertEqual(add(2, 2), 4)
"""
NODES = tuple(
    f"tests/test_add.py::{name}"
    for name in ("test_plain", "test_many[1]", "test_many[2]", "test_raises", "TestGroup::test_method", "Old::test_old")
)
FILES = {"tests/test_add.py": TESTS, "helpers.py": b"def three():\n    return 3\n"}


async def graded(sandbox, code, *, files=FILES, nodes=NODES, **options):
    """The result of hidden tests."""
    return await grade(sandbox, code, PytestSuite(files, hidden=nodes, **options), limits=LIMITS)


@pytest.mark.long
async def test_a_solution_that_passes_has_a_report_of_each_test(sandbox_with_pytest):
    result = await graded(sandbox_with_pytest, SOLUTION)
    assert [(test.id, test.verdict.value) for test in result.tests] == [(node, "passed") for node in NODES]
    assert (result.integrity.value, result.tamper_signals) == ("in_process", ())


@pytest.mark.long
async def test_each_test_has_its_own_verdict(sandbox_with_pytest):
    result = await graded(sandbox_with_pytest, "def add(a, b): return a + b if (a, b) != (2, 0) else 7\n")
    assert [test.verdict.value for test in result.tests] == ["passed", "passed", "failed", "passed", "passed", "passed"]
    assert "test_many" in result.tests[2].detail
    assert "assert 7 == 2" in result.tests[2].detail


async def test_a_test_that_is_skipped_or_not_there_is_not_passed(sandbox_with_pytest):
    tests = (
        b"import pytest\nfrom solution import add\ndef test_a():\n    pytest.skip()\n"
        b"@pytest.mark.xfail\ndef test_b():\n    add(1, 2)\n"
    )
    nodes = tuple(f"test.py::test_{name}" for name in "abc")
    result = await graded(sandbox_with_pytest, SOLUTION, files={"test.py": tests}, nodes=nodes)
    assert [test.verdict.value for test in result.tests] == ["missing"] * 3


@pytest.mark.long
async def test_a_solution_that_cannot_be_imported_is_an_error_of_every_test(sandbox_with_pytest):
    suite = PytestSuite(FILES, visible=NODES[:2])
    result = await grade(sandbox_with_pytest, "def add(a, b:\n", suite, limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == ["error", "error"]
    assert "SyntaxError" in result.load_error


@pytest.mark.long
async def test_files_that_configure_python_or_pytest_are_left_out_and_noted(sandbox_with_pytest):
    hook = b"def pytest_runtest_call(item): item.obj = lambda *a, **k: None\n"
    workspace = {
        "conftest.py": hook,
        "tests/conftest.py": hook,
        "pytest.ini": b"[pytest]\naddopts = --collect-only\n",
        "sitecustomize.py": b"import os; os._exit(0)\n",
        "x.pth": b"import os; os._exit(0)\n",
        "json.py": b"import os; os._exit(0)\n",
        "pluggy.py": b"import os; os._exit(0)\n",
        "tests/test_add.py": b"def test_plain(): pass\n",
        "data.txt": b"1",
    }
    code = "def add(a, b): return a + b if open('data.txt').read() == '1' else 0\n"
    result = await graded(sandbox_with_pytest, code, workspace=workspace)
    assert result.score == 1.0
    assert result.tamper_signals == ("configuration_submitted", "test_file_submitted")
    result = await graded(sandbox_with_pytest, "def add(a, b): return 0\n", workspace=workspace, nodes=NODES[:1])
    assert result.score == 0.0


FIXED = {
    "conftest.py": b"import pytest\nfrom solution import add\n@pytest.fixture\ndef three(): return add(1, 2)\n",
    "test.py": b"def test_it(three):\n    assert three == 3\n",
}


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (SOLUTION, "passed"),
        ("import os\nos._exit(0)\n", "missing"),
        ("import sys\nsys.exit(0)\n", "missing"),
        ("import os\nos.write(3, b'x\\n')\n", "protocol"),
        ("raise ValueError('no')\n", "missing"),
        ("import os\nos.write(2, b\"No module named 'pytest'\")\nos._exit(1)\n", "missing"),
    ],
)
@pytest.mark.long
async def test_a_solution_that_fails_in_the_conftest_of_the_suite_is_graded(sandbox_with_pytest, code, verdict):
    result = await grade(sandbox_with_pytest, code, PytestSuite(FIXED, visible=("test.py::test_it",)), limits=LIMITS)
    assert [test.verdict.value for test in result.tests] == [verdict], result
    assert ("ValueError: no" in result.tests[0].detail) is ("ValueError" in code)


MIB = b"x" * (1 << 20)


@pytest.mark.parametrize(
    ("workspace", "verdict"),
    [
        ({"a": b"", "a/b": b""}, "error"),
        ({"helpers.py/x": b""}, "error"),
        ({"agentenv-pytest.ini/x": b""}, "error"),
        ({"../x": b""}, "error"),
        ({f"{index}.txt": MIB for index in range(40)}, "limit"),
        ({"a.txt": 40 * MIB}, "limit"),
        ({"a.txt": 20 * MIB}, "passed"),
        ({f"{index}.txt": b"" for index in range(2000)}, "limit"),
    ],
    ids=["file and folder", "folder of ours", "folder of pytest's", "above", "files", "file",
         "20 MiB", "entries"],
)  # fmt: skip
@pytest.mark.long
async def test_files_of_the_policy_that_cannot_be_written_fail_its_tests(sandbox_with_pytest, workspace, verdict):
    result = await graded(sandbox_with_pytest, SOLUTION, nodes=NODES[:2], workspace=workspace)
    assert [test.verdict.value for test in result.tests] == [verdict] * 2, result
    assert (result.score, result.infra_detail) == (float(verdict == "passed"), "")


async def test_test_files_that_do_not_fit_are_an_error_of_configuration(sandbox):
    with pytest.raises(ConfigError, match=r"PytestSuite\.files: expected files that fit"):
        await graded(sandbox, SOLUTION, files={**FILES, "data": 40 * MIB})


OVERLAP = b"""
import pytest
from solution import overlap

def test_bare():
    assert overlap((0, 2), (1, 3))

def test_negated():
    assert not overlap((0, 1), (2, 3))

def test_true():
    assert overlap((0, 9), (4, 5)) == True

@pytest.mark.parametrize("pair", [((0, 1), (1, 2)), ((1, 2), (0, 1))])
def test_false(pair):
    assert overlap(*pair) is False

def test_order():
    assert overlap((0, 2), (1, 3)) > 0

def test_in():
    assert overlap((5, 6), (0, 9)) in (True, 1)
"""
OVERLAP_NODES = tuple(
    f"test_overlap.py::test_{name}"
    for name in ("bare", "negated", "true", "false[pair0]", "false[pair1]", "order", "in")
)
MUTANTS = (
    "False", "True", "a[0] <= b[1] and b[0] <= a[1]", "a[0] < b[0] < a[1]", "b[0] < a[0] < b[1]", "a[1] < b[0]",
    "None", "a[0] < b[1]", "not (a[0] < b[1] and b[0] < a[1])", "0", "1", "[]", "1 / 0",
)  # fmt: skip


@pytest.mark.parametrize(
    "expression", [MUTANTS[0], *(pytest.param(one, marks=pytest.mark.long) for one in MUTANTS[1:])]
)
async def test_a_wrong_solution_that_is_honest_is_no_tampering(sandbox_with_pytest, expression):
    code = f"def overlap(a, b):\n    return {expression}\n"
    suite = {"files": {"test_overlap.py": OVERLAP}, "nodes": OVERLAP_NODES}
    result = await graded(sandbox_with_pytest, code, **suite)
    plain = await graded(sandbox_with_pytest, code, decoys=False, **suite)
    assert result.tamper_signals == ()
    assert [test.verdict for test in result.tests] == [test.verdict for test in plain.tests]


LOOPS = b"""
from solution import divisors

def test_value():
    assert divisors(6) == [2, 3]

def test_each():
    assert True
    for one in divisors(12):
        assert 12 % one == 0

def test_early():
    if not divisors(7):
        return
    assert divisors(7) == [7]

def test_last():
    assert divisors(9)[-1] == 3

def test_raises():
    try:
        divisors("6")
        assert False, "a text has no divisors"
    except TypeError:
        pass
"""
LOOP_NODES = tuple(f"test_loops.py::test_{name}" for name in ("value", "each", "early", "last", "raises"))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("[d for d in range(2, n) if n % d == 0]", ["passed", "passed", "missing", "passed", "passed"]),
        ("[2, 3]", ["passed", "passed", "failed", "passed", "failed"]),
        ("[]", ["failed", "missing", "missing", "failed", "failed"]),
    ],
)
async def test_a_test_whose_asserts_are_not_reached_is_not_passed_and_is_no_tampering(
    sandbox_with_pytest, expression, expected
):
    code = f"def divisors(n):\n    return {expression}\n"
    result = await graded(sandbox_with_pytest, code, files={"test_loops.py": LOOPS}, nodes=LOOP_NODES)
    assert ([test.verdict.value for test in result.tests], result.tamper_signals) == (expected, ())


class Telling:
    """A sandbox whose program says this instead."""

    isolation, limits = Isolation.NONE, LIMITS

    def __init__(self, **result):
        self.result = result

    async def run(self, program, *, files=None, fetch=(), **_):
        given = {"status": ExecStatus.OK, "exit_code": 0, "files": {name: files[name] for name in fetch}} | self.result
        return ExecResult(isolation=Isolation.NONE, **given)


def lines(*reports, exit_code=0):
    """A channel with these reports, of the only test without decoys."""
    phases = "".join(
        f'{{"node":"test.py::test_it","when":"{when}","outcome":"{outcome}","detail":""}}\n'
        for when, outcome in reports
    )
    return f'{{"begin":true}}\n{phases}{{"end":true,"exit":{exit_code},"signals":[]}}\n'.encode()


PASSED = (("setup", "passed"), ("call", "passed"), ("teardown", "passed"))


@pytest.mark.parametrize(
    ("channel", "exit_code", "verdict", "signal"),
    [
        (lines(*PASSED), 0, "passed", None),
        (lines(*PASSED), 1, "protocol", "exit_disagrees"),
        (lines(*PASSED, exit_code=1), 1, "protocol", "exit_disagrees"),
        (lines(*PASSED, exit_code=1), 0, "protocol", "exit_disagrees"),
        (lines(*PASSED, *PASSED), 0, "protocol", "broken_protocol"),
        (lines(*PASSED) + b"{}\n", 0, "protocol", "broken_protocol"),
        (lines(*PASSED[:2]), 0, "missing", None),
        (lines(*PASSED[1:]), 0, "missing", None),
        (lines(("setup", "passed"), ("call", "failed"), ("teardown", "passed"), exit_code=1), 1, "failed", None),
        (lines(("setup", "failed"), ("teardown", "passed"), exit_code=1), 1, "error", None),
        (lines(*PASSED[:2], ("teardown", "failed"), exit_code=1), 1, "error", None),
        (lines(("setup", "skipped"), ("teardown", "passed")), 0, "missing", None),
        (lines(), 5, "missing", None),
        (b'{"begin":true}\n', 0, "missing", "early_exit"),
        (b'{"begin":true}\nx\n', 0, "protocol", "broken_protocol"),
        (b"", 0, "infra", None),
    ],
)
async def test_a_pass_needs_each_phase_once_and_an_exit_status_that_agrees(channel, exit_code, verdict, signal):
    sandbox = Telling(channel=channel, exit_code=exit_code, status=ExecStatus.NONZERO if exit_code else ExecStatus.OK)
    files = {"test.py": b"def test_it(): pass\n"}
    result = await graded(sandbox, SOLUTION, files=files, nodes=("test.py::test_it",))
    assert result.tests[0].verdict.value == verdict
    assert signal is None or signal in result.tamper_signals


@pytest.mark.parametrize("files", [{}, {"test.py": b"def test_it(): return\n", "agentenv-pytest.ini": b"[pytest]\n"}])
async def test_a_test_file_that_is_another_after_the_run_is_tampering(files):
    sandbox = Telling(channel=lines(*PASSED), files=files)
    result = await graded(sandbox, "", files={"test.py": b"def test_it(): pass\n"}, nodes=("test.py::test_it",))
    assert (result.score, result.tamper_signals) == (0.0, ("test_file_changed",))


async def test_a_test_file_that_is_not_python_is_refused(sandbox):
    with pytest.raises(ConfigError, match="expected Python in"):
        await graded(sandbox, "", files={"test.py": b"def test_it(:\n"}, nodes=("test.py::test_it",))


class OnHost:
    """The program of a grader as a process of this machine, which sees its files."""

    isolation, limits = Isolation.NONE, LIMITS

    async def run(self, program, *, stdin=b"", **_):
        with tempfile.TemporaryFile() as channel:
            command = [sys.executable, "-I", "-S", "-c", f"import os; os.dup2({channel.fileno()}, 3)\n{program}"]
            done = subprocess.run(command, input=stdin, capture_output=True, pass_fds=[channel.fileno()], check=False)
            channel.seek(0)
            status = ExecStatus.NONZERO if done.returncode else ExecStatus.OK
            stderr = done.stderr.decode(errors="replace")
            return ExecResult(status, exit_code=done.returncode, stderr=stderr, channel=channel.read())


@pytest.mark.parametrize("broken", ["pytest/__init__.py", "_pytest/config/__init__.py", "_pytest/junitxml.py"])
@pytest.mark.long
async def test_a_pytest_that_breaks_before_the_solution_is_an_error_of_configuration(monkeypatch, tmp_path, broken):
    for name in ("pytest", "_pytest"):
        shutil.copytree(Path(pytest.__file__).parent.parent / name, tmp_path / name)
    (tmp_path / broken).write_text("import nothing_of_this_name")
    path = [str(tmp_path), *in_process._pytest_path()]
    monkeypatch.setattr(in_process, "_pytest_path", lambda: path)
    files = {"test.py": b"def test_it(): pass\n"}
    with pytest.raises(ConfigError, match=r"expected a sandbox with pytest, got .*nothing_of_this_name"):
        await graded(OnHost(), SOLUTION, files=files, nodes=("test.py::test_it",))


@pytest.mark.parametrize("decoys", [True, False])
@pytest.mark.parametrize(
    "body",
    ["assert True", "assert add(1, 2) == 3 or True", "assert (add(1, 2) == 3, 'wrong')",
     "assert (n for n in [add(1, 2)])", "'text'\n        assert add(1, 2) == add(1, 2)\n        pass"],
)  # fmt: skip
async def test_a_test_that_no_program_can_fail_is_an_error_of_the_data(sandbox, body, decoys):
    tests = f"from solution import add\nclass TestIt:\n    def test_it(self):\n        {body}\n".encode()
    node = "test.py::TestIt::test_it"
    with pytest.raises(DataError, match=f"PytestSuite: expected tests that can fail, got '{node}'"):
        await graded(sandbox, SOLUTION, files={"test.py": tests}, nodes=(node,), decoys=decoys)


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("assert True\n    assert add(1, 2) == 3", "passed"),
        ("add(1, 2)\n    assert True", "passed"),
        ("assert add(1, 2) is add(1, 2)", "passed"),
        ("from solution import add\n    assert True", "passed"),
        ("with pytest.raises(TypeError):\n        add(1, '')\n    assert True", "passed"),
        ("try:\n        add(1, '')\n        assert False\n    except TypeError:\n        pass", "passed"),
        ("try:\n        assert add(1, 2) == 3\n    except Exception as e:\n        pytest.fail(str(e))", "passed"),
        ("try:\n        assert add(1, 2) == 3\n    except Exception:\n        raise", "passed"),
        ("try:\n        assert add(1, 2) == 3\n    except:\n        pass", "missing"),
        ("try:\n        assert add(1, 2) == 3\n    except AssertionError:\n        print('no')", "missing"),
        ("with contextlib.suppress(Exception):\n        assert add(1, 2) == 3", "missing"),
    ],
)  # fmt: skip
async def test_a_test_that_catches_its_own_errors_shows_nothing(sandbox_with_pytest, body, verdict):
    tests = f"import contextlib, pytest\nfrom solution import add\ndef test_it():\n    {body}\n".encode()
    result = await graded(sandbox_with_pytest, SOLUTION, files={"test.py": tests}, nodes=("test.py::test_it",))
    assert ([test.verdict.value for test in result.tests], result.tamper_signals) == ([verdict], ())


async def test_a_sandbox_without_pytest_is_an_error_of_configuration_and_no_failure_of_infrastructure(sandbox):
    with pytest.raises(ConfigError, match=r"PytestSuite: expected a sandbox with pytest, got .No module named"):
        await graded(sandbox, SOLUTION, files={"test.py": b"def test_it(): pass\n"}, nodes=("test.py::test_it",))
