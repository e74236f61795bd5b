"""How much another process has computed: from /proc, or unknown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.rewards.workers import pool
from agentenv.rewards.workers.pool import process_cpu_s


class Computing:
    """A process that slept for 2 s and computed for 1.2 s, and says at each line how much it has computed."""

    def __init__(self):
        code = (
            "import sys, time\ntime.sleep(2)\nwhile time.process_time() < 1.2: pass\n"
            "for _ in sys.stdin: print(time.process_time(), flush=True)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@pytest.fixture
def computing():
    made = Computing()
    yield made
    made.process.kill()
    made.process.communicate()


def assert_measured(computing, resolution_s):
    """What is measured lies between what the process says before and after it, but for the resolution."""
    before = computing.says()
    used_s = process_cpu_s(computing.process.pid)
    after = computing.says()
    assert used_s is not None
    assert before - resolution_s <= used_s <= after + resolution_s


@pytest.mark.long
def test_reports_the_cpu_time_of_a_process_and_not_its_age(computing):
    assert_measured(computing, 0.03)


def test_is_unknown_without_proc_and_for_a_process_that_is_gone(monkeypatch, tmp_path):
    assert process_cpu_s(2**22 + 1) is None
    monkeypatch.setattr(pool, "_PROC", tmp_path)
    assert process_cpu_s(os.getpid()) is None


def test_a_name_with_spaces_and_brackets_works(monkeypatch, tmp_path):
    (tmp_path / "7").mkdir()
    numbers = " ".join(map(str, range(4, 30)))
    (tmp_path / "7" / "stat").write_text(f"7 (a) R 1 (b)) S {numbers}\n")
    monkeypatch.setattr(pool, "_PROC", Path(tmp_path))
    assert process_cpu_s(7) == (14 + 15) / os.sysconf("SC_CLK_TCK")
