"""`python -m tests.long_tail`: which tests come first, what runs again, and what turns a run red."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long_tail import MAX_FAILURES, order_of_files

ROOT = Path(__file__).parent.parent
FILES = ["tests/runs/test_run.py", "tests/chat/test_chat.py", "tests/gymnasium_env/test_env.py", "tests/test_docs.py"]


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("agentenv/runs/run.py", "tests/runs/test_run.py"),
        ("agentenv/gym/env.py", "tests/gymnasium_env/test_env.py"),
        ("tests/chat/test_chat.py", "tests/chat/test_chat.py"),
        ("docs/how-to/audit.md", "tests/test_docs.py"),
        ("README.md", "tests/test_docs.py"),
        ("tests/chat/templates.py", "tests/chat/test_chat.py"),
    ],
)
def test_the_tests_of_what_the_newest_commit_touches_come_first(path, first):
    older = ["agentenv/runs/x.py", "agentenv/gym/x.py", "agentenv/chat/x.py", "docs/x.md", "Makefile"]
    assert order_of_files(FILES, [[path], older], "seed")[0] == first
    assert order_of_files(FILES, [["Makefile"], [path]], "seed")[0] == first


def test_what_no_commit_touches_comes_last_in_an_order_that_follows_from_the_commit():
    files = [f"tests/core/test_{number}.py" for number in range(9)]
    orders = {tuple(order_of_files([*files, *FILES], [["agentenv/runs/run.py"]], seed)[1:]) for seed in ("a", "a", "b")}
    assert len(orders) == 2
    assert {frozenset(order) for order in orders} == {frozenset({*files, *FILES} - {"tests/runs/test_run.py"})}


TESTS = """
import os, pathlib, time, pytest

@pytest.mark.long
def test_passes():
    pass

@pytest.mark.long
def test_fails_beside_others():
    assert "PYTEST_XDIST_WORKER" not in os.environ

@pytest.mark.long
@pytest.mark.skipif("FAULT" not in os.environ, reason="there is no fault")
def test_fails():
    assert False

@pytest.mark.long
@pytest.mark.skipif("FAULTS" not in os.environ, reason="there are no faults")
@pytest.mark.parametrize("number", range(40))
def test_fails_often(number):
    stop = pathlib.Path(os.environ["AGENTENV_LONG_TAIL"]).with_name("stop")
    while number >= 20 and not stop.exists():
        time.sleep(0.01)
    assert False

def test_without_a_mark():
    pass
"""


def long_tail(place, seconds, **environment):
    """The exit code and the output of the command in a repository of its own."""
    (place / "tests" / "core").mkdir(parents=True)
    (place / "tests" / "core" / "test_these.py").write_text(TESTS)
    (place / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    long: x\n    slow: x\nasyncio_default_fixture_loop_scope = function\n"
    )
    (place / "fast.log").write_text("12 passed, 3 skipped in 4.05s\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=place, check=True)
    command = [sys.executable, "-m", "tests.long_tail", "--seconds", str(seconds), "--log", "fast.log"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "PYTHONPATH": str(ROOT), **environment}
    ran = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout


@pytest.mark.long
def test_what_fails_runs_again_alone_and_only_what_fails_each_time_turns_the_run_red(tmp_path):
    code, said = long_tail(tmp_path, 600, FAULT="1")
    assert code == 1, said
    assert said.count("again, alone: tests/core/test_these.py::test_fails\n") == 2
    assert "the long tail: 43 of 43 tests ran\n" in said
    assert "passes alone: tests/core/test_these.py::test_fails_beside_others\n" in said
    assert said.endswith("FAILED: tests/core/test_these.py::test_fails\n14 passed, 1 failed, 43 skipped\n"), said


@pytest.mark.long
def test_many_failures_end_the_run_at_once(tmp_path):
    code, said = long_tail(tmp_path, 600, FAULTS="1")
    assert code == 1, said
    assert "again, alone" not in said
    assert MAX_FAILURES < int(re.findall(r"(\d+) failed, \d+ skipped\n$", said)[0]) < 40


@pytest.mark.long
def test_no_test_begins_after_the_budget(tmp_path):
    code, said = long_tail(tmp_path, -1)
    assert code == 0, said
    assert "the long tail: 0 of 43 tests ran\n" in said
    assert said.endswith("12 passed, 0 failed, 3 skipped\n"), said
